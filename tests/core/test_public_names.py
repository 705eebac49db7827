"""`import ep_runtime` is light and lazy, and its stub lists the names type checkers see."""

from __future__ import annotations

import ast
import importlib
import importlib.resources
import inspect
import re
from pathlib import Path

import pytest
from child_programs import run_python

import ep_runtime
import ep_runtime as ep


def _stub_names() -> set[str]:
    tree = ast.parse((Path(ep_runtime.__file__).parent / "__init__.pyi").read_text())
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return imported | {"__version__"}


def test_the_stub_lists_the_public_names() -> None:
    # Flax and optax are optional extras, so `import *` leaves out names that need them.
    assert _stub_names() == {*ep_runtime.__all__, "linen", "nnx", "optax"}


@pytest.mark.parametrize(
    ("program", "left_out"),
    [
        (
            "ep.recv_capacity, ep.LayerSpec, ep.SpecMismatchError",
            r"(jax|jaxlib|numpy|grpc|ep_runtime\.native)$",
        ),
        ("ep.connect('none').close()", "jax$"),
        (
            "for name in ep.__all__: getattr(ep, name)\nep.connect('none').close()",
            "ep_runtime_bench",
        ),
    ],
    ids=["import", "connect without a daemon", "a training job"],
)
def test_what_is_not_needed_is_not_loaded(program: str, left_out: str) -> None:
    loaded = "import re; found = [name for name in sys.modules if re.match(sys.argv[1], name)]"
    end = "sys.exit(f'loaded {found}' if found else 0)"
    run_python("-c", f"import ep_runtime as ep, sys\n{program}\n{loaded}\n{end}", left_out)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'dispach'"):
        _ = ep_runtime.dispach  # type: ignore[attr-defined]


def test_submodules_show_their_public_names_alone() -> None:
    for name in (
        "convert",
        "distributed",
        "errors",
        "linen",
        "nnx",
        "optax",
        "recipes",
        "sharding",
    ):
        module = getattr(ep_runtime, name)
        assert dir(module) == sorted(module.__all__)
        assert all(hasattr(module, each) for each in module.__all__)
    named = {each for each in ep_runtime.__all__ if each.endswith("Error")}
    assert set(ep_runtime.errors.__all__) == named


PACKAGES = ("ep_runtime", "ep_runtime_server", "ep_runtime_client", "ep_runtime_bench")
ROOT = Path(__file__).parents[2]
# A line with an error is marked "E" and a part of the message.
SCRIPT = """\
from collections.abc import Sequence
import jax
import ep_runtime as ep

def block(layer: ep.EpLayer, stack: ep.LayerStack, x: jax.Array, params: ep.MoEParams) -> jax.Array:
    y, aux = ep.moe(stack[0], x, params, aux_loss_coeff=0.01, recipe=ep.recipes.MXFP8())
    y, aux, stats = ep.moe(layer, x, params, return_stats=True)
    counts: jax.Array = stats.tokens_per_expert
    counts.no_such_method  # E "Array" has no attribute
    assert stats.routing is not None
    own = ep.Routing(stats.routing.topk_idx, stats.routing.topk_weights)
    y, aux = ep.moe(layer, x, ep.MoEParams(None, params.wi, params.wo), routing=own)
    ep.moe(layer, x, params, routing=own.topk_idx)  # E No overload variant
    y, aux, stats = ep.moe(layer, x, params)  # E more than 2 values|Need more than 2
    ep.moe(layer, x, params, capasity=4)  # E "capasity"
    ep.moe(layer, x, params, capacity="4")  # E No overload variant
    ep.moe("layer", x, params)  # E No overload variant
    state = ep.init_moe_state(layer, ep.recipes.TensorScaling(delayed=True))
    y, aux, state = ep.moe(layer, x, params, state=state)
    y, aux, stats, state = ep.moe(layer, x, params, state=state, return_stats=True)
    y, aux = ep.moe(layer, x, params, state=state)  # E more than 2 values|Too many values
    assert state.wi is not None
    state.wi.x.no_such_method  # E "Array" has no attribute
    return y + aux

def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    recipe = ep.recipes.TensorScaling(delayed=True)
    y, state = ep.grouped_gemm(x, w, sizes, recipe=recipe, state=recipe.init_state(8))
    state.histories  # E "DelayedState" has no attribute
    ep.grouped_gemm(x, w, sizes, out_type="bfloat16")  # E "out_type"
    return ep.grouped_gemm(y, w, sizes)

def train(session: ep.Session, mesh: jax.sharding.Mesh) -> Sequence[ep.EpLayer]:
    group = session.create_group(
        "moe", mesh, ep_axis="ep", num_experts=8, hidden_size=64, max_tokens_per_rank=32
    )
    group.register_layer("a", topk=2)  # E "topk"
    group.no_such_method()  # E "Group" has no attribute
    ep.dispach(group)  # E Module has no attribute
    return [group.register_layer("a", top_k=2)]

with ep.connect("none", timeout=3.0) as session:  # E "timeout"
    ep.recv_capacity(num_experts=8)  # E Missing named argument
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_have_types(package: str) -> None:
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_the_stub_takes_every_name_from_where_it_is() -> None:
    stub = (Path(ep.__file__).parent / "__init__.pyi").read_text()
    lines = re.findall(r"^from (\S+) import (\S+) as \2$", stub, re.MULTILINE)
    assert len(lines) == stub.count("\nfrom ") + 1
    for module, name in lines:
        if name not in ("linen", "nnx"):  # of an extra; they are the same line for line
            wanted = getattr(importlib.import_module(module), name, None)
            wanted = wanted or importlib.import_module(f"{module}.{name}")
            assert getattr(ep, name) is wanted, name


def test_dir_shows_the_public_names_alone() -> None:
    program = "import ep_runtime as ep; ep.moe; print(*dir(ep))"
    found = run_python("-c", program).stdout
    assert found.split() == sorted([*ep.__all__, "integrations", "linen", "nnx", "optax"])


def test_the_options_that_checkers_know_are_those_of_moe() -> None:
    from ep_runtime_client.modules import options as module_options
    from ep_runtime_client.moe import api as moe_api

    options = set(module_options.option_names())
    assert set(moe_api.MoEOptions.__annotations__) == options - {"return_stats"} | {
        "expert_bias",
        "routing",
        "token_mask",
    }
    assert set(moe_api.ModuleOptions.__annotations__) == options - {"gated"}
    assert "return_stats" in inspect.signature(ep.moe).parameters


def test_a_script_with_wrong_arguments_fails_under_mypy(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="mypy comes with the extra dev")
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("needs the checkout, whose cache makes this quick")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--no-error-summary", "--hide-error-context", "--no-pretty", "--config-file"]
    found = run_python("-m", "mypy", *options, ROOT / "pyproject.toml", script, cwd=ROOT, code=1)
    errors: dict[int, str] = {}
    for number, text in re.findall(r"script\.py:(\d+): error: (.*)", found.stdout):
        errors[int(number)] = errors.get(int(number), "") + text
    wanted = {
        number: line.split("# E ")[1]
        for number, line in enumerate(SCRIPT.splitlines(), 1)
        if "# E " in line
    }
    assert errors.keys() == wanted.keys(), found.stdout + found.stderr
    for number, text in wanted.items():
        assert re.search(text, errors[number]), (number, errors[number])
