"""The private names of PyTorch that this project uses, all of them: one small module for each part of PyTorch.

PyTorch promises nothing about a name that begins with an underscore. So the rest of the tree does not use one:
it calls a function of a module here, which says what PyTorch does there and why a public name will not do. When a new
release of PyTorch moves something, this package is what has to change.

Every module lists what it uses as `NAMES`, dotted paths from ``torch`` on. ``tests/test_torch_private.py`` checks that

* no file outside this package names anything private of PyTorch;
* each module lists exactly the private names that it uses;
* each listed name exists in the PyTorch that is installed.

Written for and tested with 2.13. ``setup.cfg`` admits 2.11 and 2.12 too; the tests have not been run with those.

To use another private name: add it to the module of its part of PyTorch (or a new one), wrap it in a function with
a plain name, and list it in that module's `NAMES`. Modules here import PyTorch and nothing of this project.
"""
