"""A witness of a pytest run, in the sandbox: takes down what each test did, signed, before the tested code can have a say in it.

`swe.py` lays this file into a folder of its own, with a key and a `sitecustomize.py` that imports it, and puts that folder first on
PYTHONPATH: so it is there when the interpreter starts, before anything of the agent's is imported. It takes the key, removes it, keeps what
it needs of pytest and Python as they are now, and joins the plugins that pytest loads first. A test passed where no exception came out
of it before our eyes, pytest's own report says so too, and what ran was the test's own function; what of pytest was changed meanwhile is
told. A process that ends early leaves no end.

Code that runs in the same process can do anything in principle, to this too: a high fence, not a wall (docs/grading.md).

Standard library and pytest only, Python 3.6 and newer. Never fails a run: without a key it is silent.
"""

# Old Pythons, and an interpreter that is only starting:
# ruff: noqa: B004, B905, PTH100, PTH108, PTH109, PTH110, PTH119, PTH120, RUF005, RUF007, SIM105, UP004
# mypy: ignore-errors

import hashlib
import hmac
import json
import os
import re
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
PATCHED = (  # module, names: what decides about an outcome
    (
        "_pytest.runner",
        "runtestprotocol call_and_report call_runtest_hook pytest_runtest_protocol pytest_runtest_makereport "
        "pytest_runtest_call CallInfo.from_call CallInfo.__init__",
    ),
    ("_pytest.reports", "TestReport.from_item_and_call TestReport.__init__"),
    (
        "_pytest.python",
        "pytest_pyfunc_call Function.runtest Function.setup Function._getobj Function.function Function.from_parent "
        "PyobjMixin.obj PyobjMixin._getobj PyCollector.collect PyCollector._genfunctions Module._getobj importtestmodule "
        "pytest_pycollect_makeitem",
    ),
    ("_pytest.unittest", "TestCaseFunction.runtest TestCaseFunction.addError TestCaseFunction.addFailure"),
    ("_pytest.skipping", "pytest_runtest_makereport"),
    ("_pytest.assertion.rewrite", "AssertionRewritingHook.exec_module rewrite_asserts"),
    ("_pytest.main", "pytest_runtestloop wrap_session _main"),
    ("pytest", "raises fail skip approx"),
    ("pluggy", "PluginManager.register PluginManager._hookexec"),
    ("pluggy._callers", "_multicall"),  # where it is differs between versions
    ("pluggy._execution", "_multicall"),
    ("pluggy._hooks", "HookCaller.__call__ _HookCaller.__call__"),
    ("pluggy._caller", "HookCaller.__call__"),
    ("builtins", "AssertionError isinstance issubclass len sorted all any abs sum min max type getattr hasattr"),
)
HOOKS = (
    "pytest_runtest_protocol",
    "pytest_runtest_makereport",
    "pytest_runtest_call",
    "pytest_pyfunc_call",
    "pytest_runtest_logreport",
    "pytest_runtestloop",
    "pytest_runtest_setup",
    "pytest_runtest_teardown",
    "pytest_fixture_setup",
    "pytest_collection",
    "pytest_collect_file",
    "pytest_pycollect_makemodule",
    "pytest_pycollect_makeitem",
    "pytest_generate_tests",
    "pytest_make_collect_report",
    "pytest_itemcollected",
    "pytest_collectreport",
    "pytest_collection_modifyitems",
    "pytest_collection_finish",
)
MOST_ODD = 50
MOST_LOOKED = 500  # functions behind one test


def _pen(key, path):
    """What signs and writes one line. Everything it uses is taken now."""
    signed, dumps = hmac.new(key, b"", hashlib.sha256), json.dumps
    open_, write, close, getpid = os.open, os.write, os.close, os.getpid
    flags, owner, last = os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.getpid(), [b""]

    def say(**record):
        if getpid() != owner:  # a test forked
            return
        line = dumps(record, sort_keys=True).encode("utf-8", "backslashreplace")
        mac = signed.copy()
        mac.update(last[0] + line)
        last[0] = mac.hexdigest().encode()
        file = open_(path, flags, 0o600)
        try:
            write(file, last[0] + b" " + line + b"\n")
        finally:
            close(file)

    return say


def _original():
    """Where each thing is found, what it is now, and the code that it has."""
    known = []
    for module, names in PATCHED:
        try:
            __import__(module)
        except ImportError:
            continue
        for name in names.split():
            owner, _, attribute = name.rpartition(".")
            place = vars(sys.modules[module]).get(owner) if owner else sys.modules[module]
            if place is not None and attribute in vars(place):
                known.append((module + "." + name, place, attribute, vars(place)[attribute]))
    for name, value in list(vars(unittest.TestCase).items()):
        if name.startswith(("assert", "fail", "run", "_call")) and callable(value):
            known.append(("unittest.TestCase." + name, unittest.TestCase, name, value))
    return [(name, place, attribute, value, _code(value)) for name, place, attribute, value in known]


def _code(value):
    value = value.fget if isinstance(value, property) else value
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _part(one, name):
    try:
        return getattr(one, name, None)
    except Exception:  # what a test's code makes of it
        return None


def _behind(value):
    """All functions' code that is reached from what is about to be called: decorators keep what they decorate in one of these."""
    seen, queue, found = {}, [value], []  # by id, and kept: ids are used again
    while queue and len(seen) < MOST_LOOKED:
        one = queue.pop(0)
        if id(one) in seen or isinstance(one, (type, type(sys), str, bytes, int)):
            continue
        seen[id(one)] = one
        code = _part(one, "__code__")
        if code is not None:
            found.append(code)
        for cell in _part(one, "__closure__") or ():
            try:
                queue.append(cell.cell_contents)
            except ValueError:  # nothing in it yet
                pass
        inner = [_part(one, name) for name in ("__func__", "__wrapped__", "func", "inner_test", "hypothesis")]
        inner += _part(one, "__defaults__") or ()
        inner += (_part(one, "__kwdefaults__") or {}).values()
        if isinstance(one, (list, tuple)):
            inner += one[:20]
        elif callable(one) and code is None:
            inner += list((_part(one, "__dict__") or {}).values())[:20]
            inner.append(getattr(type(one), "__call__", None))
        queue += [each for each in inner if each is not None]
    return found


def _own(folder, tests):
    """Whether it is a test's own function that is about to run, and not something in its place. `tests`: files that no agent changes."""
    real, join, search, escape, open_ = os.path.realpath, os.path.join, re.search, re.escape, open
    behind, code_of = _behind, _code
    tests, folder, texts = frozenset(real(join(folder, one)) for one in tests), real(folder) + os.sep, {}

    def defines(file, name):
        """Not so where a test is made by other code: nobody knows the names of its functions then."""
        if file not in texts:
            with open_(file, "rb") as source:
                texts[file] = source.read().decode("utf-8", "replace")
        return search(r"\bdef\s+" + escape(name) + r"\b", texts[file]) is not None

    def own(item, root):
        path, _, rest = str(item.nodeid).partition("::")
        mine, name = real(join(root, path)), rest.partition("[")[0].rpartition("::")[2]
        for each in type(item).__mro__:
            file = getattr(code_of(vars(each).get("runtest")), "co_filename", "")
            if file.startswith(folder) and real(file) not in tests:
                return False
        if "runtest" in vars(item):
            return False
        made = not defines(mine, name)
        for code in behind(item.obj):
            file = real(join(root, code.co_filename))
            if (file == mine or file in tests) and (code.co_name == name or (made and not defines(file, name))):
                return True
        return False

    return own


def _safe(hook):
    """A hook that fails must not fail the run."""

    def safely(*given):
        try:
            return hook(*given)
        except Exception:
            return None

    return safely


class _Plugin(object):
    """What pytest sees. Its hooks are closures, so that nobody comes by their state by accident."""


def _witness(say, place, tests):
    import pytest

    plugin = _Plugin()
    known, own = _original(), _own(place, tests)
    folders = (os.path.realpath(place) + os.sep, place.rstrip(os.sep) + os.sep, os.getcwd() + os.sep)
    functions = pytest.Function
    join_, relative, sep = os.path.join, os.path.relpath, os.sep
    hooks, most = HOOKS, MOST_ODD
    started, others = os.getcwd(), set()
    variables, code_of, name_of = vars, _code, os.path.basename
    called, reported, told, names, configs = {}, {}, set(), set(), []
    skipped, expected = (pytest.skip.Exception, unittest.SkipTest), pytest.xfail.Exception

    def odd(what):
        if what not in told and len(told) < most:
            told.add(what)
            say(odd=what)

    def look(config):
        """Whether all that decides about an outcome is what it was."""
        for name, place, attribute, value, code in known:
            if variables(place).get(attribute) is not value or code_of(value) is not code:
                odd(name)
        for name in hooks:
            hook = getattr(
                config.pluginmanager.hook, name, None
            )  # some of `config.hook` are only wrappers, in pytest 7 and 8
            for one in hook.get_hookimpls() if hook is not None else ():
                file = getattr(code_of(one.function), "co_filename", "")
                if not file.startswith(sep) or (file.startswith(folders) and name_of(file) != "conftest.py"):
                    within = [one for one in folders if file.startswith(one)][:1]
                    odd(name + " of " + (file[len(within[0]) :] if within else file or "no file"))

    def looked_through(item):
        """Nobody stands between the test and us."""
        around = [
            one
            for one in item.ihook.pytest_runtest_call.get_hookimpls()
            if one.hookwrapper or getattr(one, "wrapper", False)
        ]
        if around and around[0].plugin is not plugin:
            odd("pytest_runtest_call is wrapped by " + str(around[0].plugin_name))

    def root():
        return str(getattr(configs[0], "rootpath", None) or configs[0].rootdir)

    def name_in_log(nodeid):
        """As pytest's summary has it: from where it was started."""
        path, colons, rest = str(nodeid).partition("::")
        top = root()
        return (path if top == started else relative(join_(top, path), started).replace(sep, "/")) + colons + rest

    def looked_at(item):
        """What is about to run."""
        others.discard(item.nodeid)
        if isinstance(item, functions):
            others.add(item.nodeid)  # until it is known
            if own(item, root()):
                others.discard(item.nodeid)
        looked_through(item)

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_call(item):
        look_at(item)
        outcome = yield
        take_down(item, outcome)

    def taken_down(item, outcome):
        kinds = [outcome.excinfo[0]] if outcome.excinfo else []
        kinds += [one.type for one in getattr(item, "_excinfo", None) or []]  # unittest's
        seen = "passed"
        for kind in kinds:
            if issubclass(kind, skipped):
                seen = "skipped"
            elif issubclass(kind, expected) or item.get_closest_marker("xfail"):
                seen = "xfailed"
            else:
                seen = "failed"
                break
        called[item.nodeid] = seen

    look_at, take_down = _safe(looked_at), _safe(taken_down)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(report):
        note(report)

    def noted(report):
        if report.when == "call":
            reported[report.nodeid] = report.outcome
        elif report.when == "setup" and report.outcome != "passed":
            called[report.nodeid] = reported[report.nodeid] = report.outcome

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(nodeid):
        finish(nodeid)

    def finished(nodeid):
        look(configs[0])
        seen, by_pytest = called.pop(nodeid, None), reported.pop(nodeid, None)
        if seen is None:  # it ran in another process
            return
        if seen == "passed" and by_pytest != "passed":
            seen = "failed"
        name = name_in_log(nodeid)
        names.add(name)
        say(test=name, outcome=seen, other=nodeid in others)

    def ended():
        look(configs[0])
        say(end=len(names))

    note, finish, end = _safe(noted), _safe(finished), _safe(ended)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish():
        yield
        end()

    for hook in (pytest_runtest_call, pytest_runtest_logreport, pytest_runtest_logfinish, pytest_sessionfinish):
        setattr(plugin, hook.__name__, hook)

    def join(config):
        configs.append(config)
        config.pluginmanager.register(plugin, "turngate")
        say(begin=pytest.__version__)

    return join


# ---- how it comes to be there ----

_joining = []


def pytest_configure(config):
    """This module is one of the plugins that pytest loads first. A run within the run has no witness."""
    if _joining:
        _joining.pop()(config)


def _runs_pytest():
    """Of this process's own command line: other programs leave the key alone."""
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[1:]
    names = (b"pytest", b"py.test")
    first = [os.path.basename(word) for word in words if not word.startswith(b"-")][:1]
    return bool(first and first[0] in names) or any(a == b"-m" and b in names for a, b in zip(words, words[1:]))


def _given():
    """The working folder, and the files in it that no agent changes."""
    with open(HERE + "/tests", "rb") as file:
        first, _, rest = file.read().partition(b"\0")
    return os.fsdecode(first), [os.fsdecode(path) for path in rest.split(b"\0") if path]


def take_the_stand():
    """Take the key, and be there when pytest begins."""
    if not os.path.exists(HERE + "/key") or not _runs_pytest():
        return
    with open(HERE + "/key", "rb") as file:
        key = file.read()
    os.unlink(HERE + "/key")
    folder, tests = _given()
    path, work = list(sys.path), tuple(os.path.realpath(place) + os.sep for place in (os.getcwd(), folder))
    # Nothing of the working folder's may be taken for pytest or for a part of Python.
    sys.path[:] = [place for place in path if place and not (os.path.realpath(place) + os.sep).startswith(work)]
    try:
        import _pytest.config

        _joining.append(_witness(_pen(key, HERE + "/report"), folder, tests))
        _pytest.config.default_plugins = tuple(_pytest.config.default_plugins) + (__name__,)
    finally:
        sys.path[:] = path


def hand_on():
    """The `sitecustomize` that would have been found without ours."""
    import importlib.machinery
    import importlib.util

    rest = [place for place in sys.path if os.path.abspath(place) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
