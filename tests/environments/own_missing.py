"""Needs a package that nobody has."""

import importlib

importlib.import_module("a_package_that_nobody_has")
