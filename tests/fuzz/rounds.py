"""One round of one target: fuzz it for a time with a seed, count its inputs, and collect its findings."""

from __future__ import annotations

import hashlib
import random
import re
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.coverage_guided import ROOT, CoverageGuidedFuzzer
from tests.fuzz.json_values import damaged
from tests.fuzz.requests import list_operations, read_calls, requests
from tests.fuzz.targets import TARGETS, Target
from tests.fuzz.world import DAMAGES, World

CORPUS = Path(__file__).parent / "corpus"
GUIDED = "covered-"  # starts the names of coverage-guided targets
_EXAMPLES = 60  # that Hypothesis makes in one go
_EXAMPLES_OF_OPERATION = 6
_REPORT_S = 5.0
_WORLDS = ("tree", "store", "http", "http-gate", "http-memory")
HISTORIES = st.lists(
    damaged(st.sampled_from([call["messages"] for call in read_calls("chat")]), most=2), min_size=1, max_size=5
)

NAMES = (
    *(target.name for target in TARGETS),
    *(GUIDED + target.name for target in TARGETS if target.covers),
    *_WORLDS,
)


class Found(msgspec.Struct, frozen=True):
    """A finding: an exception that the check of a target raised."""

    target: str
    seed: int
    error: str  # its type and message
    place: str  # the last frames of the traceback
    notes: str
    value: bytes  # the input: its bytes, or how Python writes it

    @property
    def kind(self) -> str:
        """A digest that findings with the same cause should share: of the error without its numbers, and of where it was raised."""
        text = re.sub(r"\d+", "", self.error[:100] + self.place.rpartition("  File")[2])
        return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.target}, seed {self.seed}\n{self.place}{self.error}\n{self.notes}\ninput: {self.value[:4000]!r}"


def run_examples(inputs: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, number: int) -> None:
    """Check random inputs, which depend only on `number`."""

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
        print_blob=False,
    )
    @given(inputs)
    def run(value: Any) -> None:
        check(value)

    run()


def read_corpus(target: Target, *folders: Path) -> list[bytes]:
    return [file.read_bytes() for folder in (CORPUS, *folders) for file in sorted((folder / target.name).glob("*"))]


class Round:
    """Fuzz one target for some seconds. A finding does not end the round; each kind is kept once.

    Inputs of coverage-guided targets that reach new lines are saved in `keep` and read from there by the next round. `report` is
    called every few seconds, so that a round that is killed has left its figures. With `shrink`, Hypothesis looks for a smaller input
    for each finding, which can take minutes.
    """

    def __init__(
        self,
        name: str,
        seconds: float,
        number: int,
        *,
        keep: Path | None = None,
        report: Callable[[Round], None] = lambda _: None,
        shrink: bool = False,
    ) -> None:
        self.name = name
        self.number = number
        self.inputs = 0
        self.coverage = 0  # steps between lines that the inputs have reached; of coverage-guided targets
        self.new_coverage = 0
        self.statuses: dict[int, int] = {}  # of HTTP replies
        self.findings: dict[str, Found] = {}
        self.found = 0  # findings of all kinds, with repetitions
        self.complete = False
        self._keep = keep
        self._report = report
        self._shrink = shrink
        self._reported = time.monotonic()
        self._began_cpu = time.process_time()
        self._end = time.monotonic() + seconds

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._began_cpu

    def run(self) -> None:
        target = next((one for one in TARGETS if one.name == self.name.removeprefix(GUIDED)), None)
        if target is None:
            self._run_world()
        elif self.name.startswith(GUIDED):
            self._run_guided(target)
        else:
            self._run_random(target.inputs, target.check)
        self.complete = True
        self._report(self)

    @property
    def _is_over(self) -> bool:
        return time.monotonic() > self._end

    def _count(self, check: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a check that collects findings instead of raising them, and does nothing after the end of the round."""

        def run(value: Any) -> None:
            if self._is_over:
                return
            self.inputs += 1
            try:
                check(value)
            except Exception as error:
                self._collect(error, value)
            if time.monotonic() - self._reported > _REPORT_S:
                self._reported = time.monotonic()
                self._report(self)

        return run

    def _collect(self, error: Exception, value: Any) -> str:
        """Keep a finding, unless one of its kind is known. Return its kind."""
        frames = [one for one in traceback.extract_tb(error.__traceback__) if one.filename.startswith(str(ROOT))]
        raw = value if isinstance(value, bytes) else repr(value).encode("utf-8", "backslashreplace")
        place, notes = "".join(traceback.format_list(frames[-3:])), "\n".join(getattr(error, "__notes__", ()))
        found = Found(self.name, self.number, f"{error!r}"[:1000], place, notes, raw)
        self.findings.setdefault(found.kind, found)
        self.found += 1
        return found.kind

    def _run_batch(
        self, inputs: st.SearchStrategy[Any], check: Callable[[Any], None], examples: int, batch: int
    ) -> None:
        known = set(self.findings)
        run_examples(inputs, self._count(check), examples, self.number + batch)
        if self._shrink and self.findings.keys() - known:
            try:
                run_examples(inputs, check, examples, self.number + batch)
            except Exception as error:
                for one in error.exceptions if isinstance(error, ExceptionGroup) else [error]:
                    kind = self._collect(one, None)
                    self.findings[kind] = msgspec.structs.replace(self.findings[kind], notes="\n".join(one.__notes__))

    def _run_random(self, inputs: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
        batch = 0
        while not self._is_over:
            self._run_batch(inputs, check, _EXAMPLES, batch)
            batch += 1

    def _run_guided(self, target: Target) -> None:
        folders = [] if self._keep is None or self._keep == CORPUS else [self._keep]
        seeds = [*target.seeds(), *read_corpus(target, *folders)]
        fuzzer = CoverageGuidedFuzzer(self._count(target.check), seeds, target.covers, self.number)
        known, start = len(fuzzer.corpus), fuzzer.coverage
        while not self._is_over:
            fuzzer.run_times(20)
            self.coverage, self.new_coverage = fuzzer.coverage, fuzzer.coverage - start
            if self._keep is not None and len(fuzzer.corpus) > known:
                save_corpus(self._keep / target.name, fuzzer.corpus[known:])
                known = len(fuzzer.corpus)

    def _run_world(self) -> None:
        with closing(World(gated=self.name == "http-gate")) as world:
            if self.name == "store":
                self._run_random(DAMAGES, world.check_damaged_row)
            elif self.name == "tree":
                self._run_random(HISTORIES, world.check_tree)
            else:
                self._run_http(world)
            self.statuses = dict(sorted(world.statuses.items()))

    def _run_http(self, world: World) -> None:
        operations = [
            (method, path)
            for method, path, _ in list_operations(world.document)
            if self.name != "http-gate" or "/admin/gate" in path
        ]
        random.Random(self.number).shuffle(operations)  # a short round does not reach all of them
        check = lambda request: world.check(request, memory=self.name == "http-memory")  # noqa: E731
        batch = 0
        while not self._is_over:
            method, path = operations[batch % len(operations)]
            self._run_batch(requests(world.document, method, path), check, _EXAMPLES_OF_OPERATION, batch)
            batch += 1


def save_corpus(folder: Path, inputs: list[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for raw in inputs:
        (folder / hashlib.sha256(raw).hexdigest()[:16]).write_bytes(raw)
