"""Test all nodes before the command (R17). Imported only with --preflight or LAUNCHER_PREFLIGHT.

    nodes       what a node must have, and the tests of the links and of the framework
    frameworks  (folder) programs of the framework's test, which run in the image's Python
    rendezvous  connections of the nodes for these tests, and between pairs of them

The rules are specified in docs/launcher-contract-preflight.md.
"""
