"""Write a signed record of what each test of a pytest run does. Runs inside the sandbox.

`observed_run.py` copies this file into a separate folder, adds a key and a `sitecustomize.py` that imports the file, and puts that folder
first on PYTHONPATH. The witness therefore starts with the interpreter, before any of the agent's code is imported. The witness reads and
deletes the key, captures the current state of the pytest and Python code that it needs, and registers as one of the first plugins of
pytest. A test counts as passed if the witness saw no exception, pytest's own report agrees, and the test's own function ran. Changes to
pytest during the run are reported. A process that ends early leaves no end record.

Python imports each module only once. A test therefore cannot import a module from the working folder if pytest has already imported
another module with the same name. To reveal such conflicts, the witness records the names of the modules that pytest imported, and the
folders in the working folder that tests search first.

Code in the same process can in principle tamper with the witness too: the witness makes cheating hard, not impossible (docs/grading.md).
While tests run, the witness uses only builtins and names that it captured at the start, not module globals that other code could replace.

The witness needs only the standard library and pytest, and supports Python 3.6 and newer. It never fails a run. Without a key, it does
nothing.
"""

# These rules do not fit old Python versions, or an interpreter that is still starting:
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
GUARDED = (  # modules, and the names in them that determine an outcome
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
    ("pluggy._callers", "_multicall"),  # its location differs between versions
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
MAX_REPORTED = 50
MAX_VISITED = 500  # objects reachable from one test


def _make_signed_writer(key, path):
    """Return a function that signs a record and appends it to the report.

    The returned function uses only names captured here, not globals that a test could replace.
    """
    signed, dumps = hmac.new(key, b"", hashlib.sha256), json.dumps
    open_, write, close, getpid = os.open, os.write, os.close, os.getpid
    flags, owner, last = os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.getpid(), [b""]

    def record(**fields):
        if getpid() != owner:  # in a process that a test forked
            return
        line = dumps(fields, sort_keys=True).encode("utf-8", "backslashreplace")
        mac = signed.copy()
        mac.update(last[0] + line)
        last[0] = mac.hexdigest().encode()
        file = open_(path, flags, 0o600)
        try:
            write(file, last[0] + b" " + line + b"\n")
        finally:
            close(file)

    return record


def _snapshot():
    """Return each guarded name, with its owner, attribute, current value and code."""
    known = []
    for module, names in GUARDED:
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
    return [(name, place, attribute, value, _code_of(value)) for name, place, attribute, value in known]


def _code_of(value):
    value = value.fget if isinstance(value, property) else value
    return getattr(getattr(value, "__func__", value), "__code__", None)


def _get(one, name):
    try:
        return getattr(one, name, None)
    except Exception:  # a test's own __getattr__ may raise anything
        return None


def _reachable_code(value, get=_get, most=MAX_VISITED, module_type=type(sys)):
    """Return the code of functions that are reachable from `value` through closures, and through attributes that decorators use.

    Visit at most `most` objects.
    """
    seen, queue, found = {}, [value], []  # `seen` keeps the objects alive, because ids are reused
    while queue and len(seen) < most:
        one = queue.pop(0)
        if id(one) in seen or isinstance(one, (type, module_type, str, bytes, int)):
            continue
        seen[id(one)] = one
        code = get(one, "__code__")
        if code is not None:
            found.append(code)
        for cell in get(one, "__closure__") or ():
            try:
                queue.append(cell.cell_contents)
            except ValueError:  # an empty cell
                pass
        inner = [get(one, name) for name in ("__func__", "__wrapped__", "func", "inner_test", "hypothesis")]
        inner += get(one, "__defaults__") or ()
        inner += (get(one, "__kwdefaults__") or {}).values()
        if isinstance(one, (list, tuple)):
            inner += one[:20]
        elif callable(one) and code is None:
            inner += list((get(one, "__dict__") or {}).values())[:20]
            inner.append(getattr(type(one), "__call__", None))
        queue += [each for each in inner if each is not None]
    return found


def _ownership_check(folder, tests):
    """Return a function that checks whether a test's own function, not a replacement, is about to run.

    `tests` lists the files that agents cannot change.
    """
    real, join, search, escape, open_ = os.path.realpath, os.path.join, re.search, re.escape, open
    reachable, code_of = _reachable_code, _code_of
    tests, folder, texts = frozenset(real(join(folder, one)) for one in tests), real(folder) + os.sep, {}

    def defines(file, name):
        """Return whether `file` defines a function called `name`. No file defines the function of a generated test."""
        if file not in texts:
            with open_(file, "rb") as source:
                texts[file] = source.read().decode("utf-8", "replace")
        return search(r"\bdef\s+" + escape(name) + r"\b", texts[file]) is not None

    def is_own(item, root):
        path, _, rest = str(item.nodeid).partition("::")
        mine, name = real(join(root, path)), rest.partition("[")[0].rpartition("::")[2]
        for each in type(item).__mro__:
            file = getattr(code_of(vars(each).get("runtest")), "co_filename", "")
            if file.startswith(folder) and real(file) not in tests:
                return False
        if "runtest" in vars(item):
            return False
        generated = not defines(mine, name)
        for code in reachable(item.obj):
            file = real(join(root, code.co_filename))
            if (file == mine or file in tests) and (code.co_name == name or (generated and not defines(file, name))):
                return True
        return False

    return is_own


def _safe(hook):
    """Wrap a hook so that an exception in it does not fail the run."""

    def safely(*given):
        try:
            return hook(*given)
        except Exception:
            return None

    return safely


class _Plugin(object):
    """The plugin that is registered with pytest. Its hooks are closures, so that other code cannot change their state by accident."""


def _tampering_checks(record, plugin, place):
    """Return two functions that report later changes: one checks pytest itself, and the other the hooks around a test."""
    known, hooks, most = _snapshot(), HOOKS, MAX_REPORTED
    folders = (os.path.realpath(place) + os.sep, place.rstrip(os.sep) + os.sep, os.getcwd() + os.sep)
    variables, code_of, name_of, sep = vars, _code_of, os.path.basename, os.sep
    reported = set()

    def report(what):
        if what not in reported and len(reported) < most:
            reported.add(what)
            record(odd=what)

    def check_pytest(config):
        """Report guarded names that have changed, and suspicious hooks.

        A hook is suspicious if it has no source file, or if its file is in the working folder but is not a conftest.py.
        """
        for name, owner, attribute, value, code in known:
            if variables(owner).get(attribute) is not value or code_of(value) is not code:
                report(name)
        for name in hooks:
            # In pytest 7 and 8, some attributes of `config.hook` are only wrappers.
            hook = getattr(config.pluginmanager.hook, name, None)
            for one in hook.get_hookimpls() if hook is not None else ():
                file = getattr(code_of(one.function), "co_filename", "")
                if not file.startswith(sep) or (file.startswith(folders) and name_of(file) != "conftest.py"):
                    within = [folder for folder in folders if file.startswith(folder)][:1]
                    report(name + " of " + (file[len(within[0]) :] if within else file or "no file"))

    def check_wrappers(item):
        """Report a hook wrapper between the test and our hook, if there is one."""
        around = [
            one
            for one in item.ihook.pytest_runtest_call.get_hookimpls()
            if one.hookwrapper or getattr(one, "wrapper", False)
        ]
        if around and around[0].plugin is not plugin:
            report("pytest_runtest_call is wrapped by " + str(around[0].plugin_name))

    return check_pytest, check_wrappers


def _test_names(configs):
    """Return two functions. One returns pytest's root folder, and the other a test's name as it appears in pytest's summary."""
    join, relative, sep, started = os.path.join, os.path.relpath, os.sep, os.getcwd()

    def root():
        return str(getattr(configs[0], "rootpath", None) or configs[0].rootdir)

    def name_in_log(nodeid):
        path, colons, rest = str(nodeid).partition("::")
        top = root()
        return (path if top == started else relative(join(top, path), started).replace(sep, "/")) + colons + rest

    return root, name_in_log


def _outcome_hooks(pytest, record, configs, is_own, checks):
    """Return the functions to call before a test, after it, on its report, when it has finished, and at the end of the run."""
    check_pytest, check_wrappers = checks
    root, name_in_log = _test_names(configs)
    functions = pytest.Function
    skipped, expected = (pytest.skip.Exception, unittest.SkipTest), pytest.xfail.Exception
    called, reported, names, replaced = {}, {}, set(), set()

    def before_call(item):
        replaced.discard(item.nodeid)
        if isinstance(item, functions):
            replaced.add(item.nodeid)  # until the check below succeeds
            if is_own(item, root()):
                replaced.discard(item.nodeid)
        check_wrappers(item)

    def after_call(item, outcome):
        kinds = [outcome.excinfo[0]] if outcome.excinfo else []
        kinds += [one.type for one in getattr(item, "_excinfo", None) or []]  # recorded by unittest
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

    def on_report(report):
        if report.when == "call":
            reported[report.nodeid] = report.outcome
        elif report.when == "setup" and report.outcome != "passed":
            called[report.nodeid] = reported[report.nodeid] = report.outcome

    def on_finish(nodeid):
        check_pytest(configs[0])
        seen, by_pytest = called.pop(nodeid, None), reported.pop(nodeid, None)
        if seen is None:  # it ran in a different process
            return
        if seen == "passed" and by_pytest != "passed":
            seen = "failed"
        name = name_in_log(nodeid)
        names.add(name)
        record(test=name, outcome=seen, other=nodeid in replaced)

    def on_end():
        check_pytest(configs[0])
        record(end=len(names))

    return _safe(before_call), _safe(after_call), _safe(on_report), _safe(on_finish), _safe(on_end)


def _add_hooks(pytest, plugin, before_call, after_call, on_report, on_finish, on_end):
    """Add hooks to the plugin. They call the given functions, which never raise."""

    @pytest.hookimpl(hookwrapper=True, trylast=True)
    def pytest_runtest_call(item):
        before_call(item)
        outcome = yield
        after_call(item, outcome)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(report):
        on_report(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(nodeid):
        on_finish(nodeid)

    @pytest.hookimpl(hookwrapper=True, tryfirst=True)
    def pytest_sessionfinish():
        yield
        on_end()

    for hook in (pytest_runtest_call, pytest_runtest_logreport, pytest_runtest_logfinish, pytest_sessionfinish):
        setattr(plugin, hook.__name__, hook)


def _create_witness(record, place, tests):
    """Return a function that registers the witness with pytest."""
    import pytest

    plugin, configs = _Plugin(), []
    checks = _tampering_checks(record, plugin, place)
    _add_hooks(pytest, plugin, *_outcome_hooks(pytest, record, configs, _ownership_check(place, tests), checks))

    def join(config):
        configs.append(config)
        config.pluginmanager.register(plugin, "turngate")
        record(begin=pytest.__version__)

    return join


# ---- startup ----

_pending = []


def pytest_configure(config):
    """Register the witness. pytest calls this function because this module is a default plugin. A nested pytest run has no witness."""
    if _pending:
        _pending.pop()(config)


def _find_pytest_command():
    """Return how this process's command line runs pytest: as a "module", as a "script", or not at all (None)."""
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().split(b"\0")[1:]
    names = (b"pytest", b"py.test")
    if any(a == b"-m" and b in names for a, b in zip(words, words[1:])):
        return "module"
    first = [os.path.basename(word) for word in words if not word.startswith(b"-")][:1]
    return "script" if first and first[0] in names else None


def _read_test_list():
    """Return the working folder, and the files in it that agents cannot change."""
    with open(HERE + "/tests", "rb") as file:
        first, _, rest = file.read().partition(b"\0")
    return os.fsdecode(first), [os.fsdecode(path) for path in rest.split(b"\0") if path]


def _list_imported_modules(work, before):
    """Return the names of the modules that were imported from outside the folders `work`.

    Tests cannot import other modules with these names. Modules in `before` are left out: Python imported them before the witness started,
    so tests would get them even without the witness.
    """
    names = set()
    for name in set(sys.modules).difference(before):
        module = sys.modules[name]
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if "." in name or not isinstance(origin, str) or origin in ("built-in", "frozen"):
            continue
        if os.path.dirname(origin) != HERE and not os.path.realpath(origin).startswith(work):
            names.add(name)
    return sorted(names)


def _find_first_places(path, folder):
    """Return the entries of the search path `path` that are in `folder` and precede Python's own library, relative to `folder`."""
    folder, library = os.path.realpath(folder), os.path.dirname(os.path.realpath(os.__file__))
    places = [os.path.realpath(place) for place in path]
    places = places[: places.index(library)] if library in places else places
    inside = [place for place in places if (place + os.sep).startswith(folder + os.sep)]
    return [os.path.relpath(place, folder) for place in inside]


def start_witness(before):
    """If this process runs pytest and there is a key, read and delete the key, and prepare the witness."""
    command = _find_pytest_command() if os.path.exists(HERE + "/key") else None
    if command is None:
        return
    with open(HERE + "/key", "rb") as file:
        key = file.read()
    os.unlink(HERE + "/key")
    folder, tests = _read_test_list()
    path, work = list(sys.path), tuple(os.path.realpath(place) + os.sep for place in (os.getcwd(), folder))
    # Nothing in the working folder may be imported as pytest or as part of Python.
    sys.path[:] = [place for place in path if place and not (os.path.realpath(place) + os.sep).startswith(work)]
    try:
        import _pytest.config

        record = _make_signed_writer(key, HERE + "/report")
        _pending.append(_create_witness(record, folder, tests))
        _pytest.config.default_plugins = tuple(_pytest.config.default_plugins) + (__name__,)
        # `python -m` adds the current folder to the path, but only after this.
        places = _find_first_places([os.getcwd()] + path if command == "module" else path, folder)
        record(imported=_list_imported_modules(work, before), places=places)
    finally:
        sys.path[:] = path


def run_next_sitecustomize():
    """Run the `sitecustomize` that Python would have found without ours."""
    import importlib.machinery
    import importlib.util

    rest = [place for place in sys.path if os.path.abspath(place) != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
