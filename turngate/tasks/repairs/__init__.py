"""Repair tasks: real packages with a bug that their tests find (`turngate tasks make repairs`).

package    the source: a folder, or a release on the package index; its files, tests and license
mutations  the bugs: small edits of a file
measure    run the tests of a package in a sandbox, with and without a bug
make       choose the bugs, write the tasks, split them by package
"""
