"""Repair tasks: real packages, each with an injected bug that the package's tests catch (`turngate tasks make repairs`).

package    load a package from a folder or from the package index: its files, tests and license
mutations  find the possible bugs: small edits to a file
measure    run the tests of a package in a sandbox, with and without a bug
make       choose bugs, write the tasks, and split them by package
"""
