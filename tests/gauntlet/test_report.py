"""Tests for the report: tables, comparisons, files and command-line errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gauntlet import publish, report
from gauntlet.__main__ import main
from gauntlet.costs import Cell, Cost, Costs, Shape
from gauntlet.features import FEATURES
from gauntlet.gateways.delivery import Verdict
from gauntlet.run import Result
from gauntlet.score import Score
from gauntlet.table import DASH
from gauntlet.trial import Rollout

CHAT, STREAMED = Cell("chat", False, Shape(16, 20)), Cell("chat", True, Shape(16, 20))
ABOUT = {"date": "2026-01-01", "machine": "a machine", "python": "3.11", "command": "make gauntlet"}


def result(name: str, kept: int, whole_ms: float, streamed_ms: float, mb: float, later: float = 0.01) -> Result:
    score = Score(rollouts=1, finished=1, turns=2, captured=2, trained=kept, exact=kept, wanted=100, learned=kept)
    rollouts = [Rollout("append-only", "chat", streamed, score) for streamed in (False, True)]
    cells = [Cost(CHAT, [whole_ms + 5, whole_ms], [3.0, 1.0, 2.0]), Cost(STREAMED, [streamed_ms], [2.0])]
    return Result(name, "", ("chat",), True, rollouts=rollouts, costs=Costs(100, {20: mb}, {20: later}, cells))


OURS, EXACT, RELAY = result("turngate", 100, 1, 2, 0.1), result("rllm", 100, 8, 8, 0.5), result("litellm", 0, 6, 3, 0.2)
ABSENT = Result("openenv", "", ("chat",), True, error="it ended with 1")
ALL = [OURS, EXACT, RELAY, ABSENT]


def test_record_level_of_each_gateway() -> None:
    assert [report.describe_records(each) for each in ALL] == [
        "exact tokens",
        "exact tokens",
        "relays only",
        DASH,
    ]


def test_gateway_that_loses_some_tokens_still_records_exact_ones() -> None:
    assert report.describe_records(result("agentcore", 95, 8, 8, 0.5)) == "exact tokens"
    assert report.describe_records(result("rllm", 85, 8, 8, 0.5)) == "some tokens"


def test_refusals_are_shown_only_of_a_gateway_that_reports_them() -> None:
    score = Score(rollouts=1, turns=1, captured=1, trained=5, exact=5, wanted=5, learned=5, greedy=2, refused=2)
    cells = []
    for reports in (True, False):
        one = Result("one", "", ("chat",), True, reports_refusals=reports, rollouts=[Rollout("x", "chat", True, score)])
        cells.append(report.describe_result(one))
    assert "greedy answers trained 2; errors reported –; refusals reported 0/2" in cells[0]
    assert f"refusals reported {DASH}" in cells[1]


def test_compare_uses_best_repeat_and_worst_cell() -> None:
    output = report.compare(ALL, "turngate")
    assert "exact tokens, worst cell: chat streamed 16x20: turngate 2.00 ms, rllm 8.00 ms, 4.0 times" in output[0]
    assert "only relays, worst cell: chat streamed 16x20: turngate 2.00 ms, litellm 3.00 ms, 1.5 times" in output[3]
    assert output[-2:] == [
        "memory of a session of 20 turns: turngate 0.10 MB, rllm 0.50 MB (5.0 times)",
        "memory of a session of 20 turns, 80 s later: turngate 0.01 MB, rllm 0.01 MB (both next to nothing)",
    ]
    more = [OURS, result("openenv", 100, 8, 8, 0.5, 0.6), result("verifiers", 100, 8, 8, 0.02)]
    assert report.compare(more, "turngate")[-2:] == [
        "memory of a session of 20 turns: turngate 0.10 MB, verifiers 0.02 MB (0.2 times), openenv 0.50 MB (5.0 times)",
        "memory of a session of 20 turns, 80 s later: turngate 0.01 MB, verifiers 0.01 MB (both next to nothing), "
        "openenv 0.60 MB (ours is below 0.05 MB)",
    ]


def test_gateway_that_did_not_run_has_a_row() -> None:
    assert "| openenv | did not run |" in report.table(ALL)
    assert report.list_errors(ALL) == ["openenv: did not run: it ended with 1"]
    widths = {line.count("|") for line in report.table(ALL).splitlines()}
    assert len(widths) == 1


def test_readme_is_replaced_only_between_marks(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"# Ours\n\n{publish.BEGIN}\nstale\n{publish.END}\n\nThe end.\n")
    assert publish.has_marks(readme)
    for _ in range(2):
        publish.write_readme(readme, ALL, ABOUT)
    text = readme.read_text()
    assert text.startswith(f"# Ours\n\n{publish.BEGIN}\n\n| gateway |")
    assert text.endswith(f"{publish.END}\n\nThe end.\n")
    assert text.count("| rllm |") == 1
    assert "stale" not in text


@pytest.mark.process
def test_results_page_has_json_file(tmp_path: Path) -> None:
    page = tmp_path / "results.md"
    publish.write_page(page, ALL, ABOUT, "turngate")
    assert "openenv: did not run: it ended with 1" in page.read_text()
    output = json.loads(page.with_suffix(".json").read_text())
    assert [each["gateway"] for each in output["gateways"]] == ["turngate", "rllm", "litellm", "openenv"]
    assert output["gateways"][0]["costs"][0]["cpu_ms"] == [6, 1]


@pytest.mark.process
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--scenario", "nope"], "choose from 'append-only'"),
        (["--gateway", "nope"], "choose from 'turngate'"),
        (["--dialect", "nope"], "choose from 'chat'"),
        (["--load", "3y4"], "16x20"),
        (["--repeats", "0"], "at least 1"),
        (["--url", "localhost"], "must be an HTTP URL, not localhost"),
        (["--record", "cat"], "need --url"),
        (["--compare", "nope"], "choose from 'turngate'"),
        (["--url", "http://here", "--load", "1x2"], "--load cannot be combined with --url"),
        (
            ["--url", "http://here", "--open", "my-open {rollout}"],
            "--open 'my-open {rollout}': command not found: my-open",
        ),
        (
            ["--url", "http://here", "--record", "./my-record"],
            "--record './my-record': command not found: ./my-record",
        ),
        (["--url", "http://here", "--record", "cat '"], "No closing quotation"),
        (["--engine-port", "70000"], "must be a port number, not 70000"),
        (["--readme", "/nowhere/README.md"], "<!-- gauntlet -->"),
        (["--results", "/nowhere/results.md"], "folder not found"),
        (["--only-features", "--url", "http://here"], "cannot be combined with --url"),
        (["--only-features", "--results", "/nowhere/results.md"], "needs both --results and --readme"),
        (
            ["--only-features", "--results", "/nowhere/results.md", "--readme", "README.md"],
            "updates a page that exists",
        ),
    ],
)
def test_invalid_option_is_rejected_at_start(
    options: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gauntlet", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_summary_has_six_columns_and_a_line_per_gateway() -> None:
    lines = report.summary(ALL).splitlines()
    assert {line.count("|") for line in lines} == {7}
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["turngate", "rllm", "litellm", "openenv"]
    assert "| openenv | did not run |" in lines[-1]


def with_features(result: Result, *carried: str) -> Result:
    features = {name: Verdict("yes") if name in carried else Verdict("no", "it has no field") for name in FEATURES}
    return replace(result, features=features)


def test_summary_names_what_rows_carry() -> None:
    lines = report.summary([with_features(OURS, "experts", "tree"), with_features(RELAY), ABSENT]).splitlines()
    assert {line.count("|") for line in lines} == {8}
    assert lines[0].endswith("| rows also carry |") and lines[2].endswith("| experts, tree |")
    assert lines[3].endswith(f"| {DASH} |") and lines[4].endswith(f"| {DASH} |")


def test_features_are_updated_without_the_other_results(tmp_path: Path) -> None:
    readme, page = tmp_path / "README.md", tmp_path / "results.md"
    readme.write_text(f"# Ours\n\n{publish.BEGIN}\n{publish.END}\n\nThe end.\n")
    publish.write_readme(readme, ALL, ABOUT)
    publish.write_page(page, ALL, ABOUT, "turngate")
    before = readme.read_text(), page.read_text()
    publish.update_features(page, readme, [with_features(OURS, "experts"), with_features(EXACT)], ABOUT)
    publish.update_features(page, readme, [with_features(OURS, "tree")], ABOUT)  # the others keep what they had
    lines = readme.read_text().splitlines()
    assert [
        line.replace(" tree |", "").replace(f" {DASH} |", "") for line in lines if line.startswith("| turngate")
    ] == [line.replace(f" {DASH} |", "") for line in before[0].splitlines() if line.startswith("| turngate")]
    assert len(lines) == len(before[0].splitlines())
    assert "Measured on 2026-01-01: a machine. The last column was tested on 2026-01-01." in lines
    assert page.read_text().count("### What rows carry") == 1 and "Tested on 2026-01-01" in page.read_text()
    assert (
        "- `rllm`, experts, masks, tree, turn rewards, teacher, versions, loaders: no: it has no field"
        in page.read_text()
    )
    start, end = (
        page.read_text().split(report.FEATURES_BEGIN)[0],
        page.read_text().split(f"{report.FEATURES_END}\n\n")[1],
    )
    assert start + end == before[1]
    output = json.loads(page.with_suffix(".json").read_text())["gateways"]
    assert output[0]["features"]["tree"] == {"mark": "yes", "detail": ""} and output[2]["features"] == {}
