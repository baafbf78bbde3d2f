from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import shardset

HEAVY = {"PIL", "click", "numpy", "orjson", "pyarrow", "rich", "simplejpeg", "torch"}


def run_fresh(code):
    """Run code in a new interpreter and return what it printed as JSON."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def names_for_type_checkers():
    """The names that the package imports under ``if TYPE_CHECKING:``."""
    tree = ast.parse(Path(shardset.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) and node.level]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_all_is_sorted_and_names_nothing_twice():
    assert list(shardset.__all__) == sorted(set(shardset.__all__))


@pytest.mark.parametrize("name", shardset.__all__)
def test_every_public_name_resolves_to_the_thing_of_that_name(name):
    value = getattr(shardset, name)
    assert not isinstance(value, ModuleType)
    if isinstance(value, type) and value.__module__.startswith("shardset."):
        # Aliases keep the name that they were given at home.
        assert getattr(sys.modules[value.__module__], value.__name__) is value


def test_the_namespace_holds_no_public_name_that_all_leaves_out():
    for name in shardset.__all__:
        getattr(shardset, name)
    found = {
        name for name, value in vars(shardset).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    bookkeeping = {"annotations", "TYPE_CHECKING"}
    assert found - bookkeeping <= set(shardset.__all__)


def test_type_checkers_see_exactly_the_names_that_exist_at_run_time():
    assert names_for_type_checkers() == {name for name in shardset.__all__ if not name.startswith("__")}


def test_dir_lists_every_public_name():
    assert set(shardset.__all__) <= set(dir(shardset))


def test_an_unknown_name_is_an_attribute_error_that_quotes_it():
    with pytest.raises(AttributeError, match="no_such_name"):
        shardset.no_such_name  # noqa: B018 - the access itself is what fails


def test_importing_the_package_imports_nothing_heavy():
    modules = run_fresh("import json, sys, shardset; dir(shardset); print(json.dumps(sorted(sys.modules)))")
    assert "shardset" in modules
    assert HEAVY.isdisjoint(modules)


def test_importing_the_command_line_imports_no_arrays_and_no_tables():
    modules = run_fresh("import json, sys, shardset.cli; print(json.dumps(sorted(sys.modules)))")
    assert {"numpy", "pyarrow", "PIL", "rich.progress", "torch"}.isdisjoint(modules)
