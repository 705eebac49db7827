"""Wrong arguments raise a ValueError that names the argument, and leave nothing behind."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SMALL
from flax import nnx
from jax._src import dispatch

import ep_runtime as ep
from ep_runtime import translate_errors
from ep_runtime_client.base import jax_state, layers
from ep_runtime_client.daemons.client import job_name

INF = float("inf")
SIZES = SMALL | {"max_token_dtype": "float32"}


@pytest.fixture(scope="module")
def session() -> Iterator[ep.Session]:
    with ep.connect("none") as made:
        yield made


@pytest.fixture(scope="module")
def group(session: ep.Session) -> ep.Group:
    return session.create_group("wrong", fakes.mesh_of({"ep": 2}), **SIZES)


def refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(ep.InvalidArgumentError, match=text) as error:
        call()
    assert isinstance(error.value, ValueError)


def test_of_an_estimate() -> None:
    mesh = fakes.mesh_of({"ep": 2})
    refused(lambda: ep.estimate_memory("g", mesh, **SIZES, capacity_factor=INF), "must be finite")


def test_names_are_text(session: ep.Session, group: ep.Group) -> None:
    mesh: Any = fakes.mesh_of({"ep": 2})
    number: Any = 7
    refused(lambda: session.create_group(number, mesh, **SIZES), "group name must be text, got 7")
    refused(lambda: group.register_layer(number, top_k=2), "layer name must be text, got 7")
    refused(lambda: ep.connect("none", job=number), "job name must be text, got 7")
    refused(lambda: session.group(number), "group name must be text, got 7")
    refused(lambda: group.layer(number), "layer name must be text, got 7")
    refused(lambda: ep.layer(number), "name must be text, got 7")


@pytest.mark.parametrize("name", ["$(id)", "two words", "-x", "a\u202eb"], ids=ascii)
def test_names_are_nothing_that_a_shell_reads(
    session: ep.Session, group: ep.Group, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: Any = fakes.mesh_of({"ep": 2})
    refused(lambda: session.create_group(name, mesh, **SIZES), "group name must be")
    refused(lambda: group.register_layer(name, top_k=2), "layer name must be")
    refused(lambda: group.register_layer_stack(name, 2, top_k=2), "layer name must be")
    refused(lambda: group.register_layers([ep.LayerSpec(name, top_k=2)]), "layer name must be")
    refused(lambda: ep.connect("none", job=name), "job name must be")
    refused(lambda: ep.connect("none", labels={name: ""}), "labels must be")
    monkeypatch.setenv("EP_RUNTIME_JOB", name)
    refused(lambda: ep.connect("none"), "job name must be")


def test_jobs_that_nobody_named_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EP_RUNTIME_JOB", raising=False)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert job_name(None) == str(os.getpid())
    for address in ("10.0.0.1:1234", "[::1]:1234", "node-7.cluster.local:8476"):
        monkeypatch.setattr(jax_state, "coordinator", lambda address=address: address)
        assert job_name(None) == address
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    assert job_name(None) == "4242"


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        ({"team": 7}, "labels must map text to text, got 'team': 7"),
        ({7: "nlp"}, "labels must map text to text, got 7: 'nlp'"),
        ("team=nlp", "labels must map text to text, got 'team=nlp'"),
    ],
)
def test_of_labels_starts_no_daemon(labels: Any, text: str) -> None:
    before = _children()
    refused(lambda: ep.connect("embedded", labels=labels), text)
    assert _children() == before


def _children() -> set[str]:
    told = Path("/proc/self/task").glob("*/children")
    return {pid for thread in told for pid in thread.read_text().split()}


def test_of_layers(group: ep.Group) -> None:
    wrong: Any = 2.0
    refused(lambda: group.register_layer("l", top_k=wrong), "top_k must be an integer, got 2.0")
    refused(lambda: group.register_layers(["l"]), "layers must be ep.LayerSpec, got 'l'")
    assert group.register_layer("l", top_k=np.int64(2)).top_k == 2
    for many, text in (("3", "an integer, got '3'"), (2.5, "an integer, got 2.5"), (0, "1 to")):
        refused(
            lambda many=many: group.register_layer_stack("stack", many, top_k=2),
            f"num_layers must be {text}",
        )
    stack = group.register_layer_stack("stack", 3, top_k=2)
    refused(lambda: stack[1.5], "takes an integer or a traced int32 scalar, got 1.5")
    refused(lambda: stack[np.arange(3)], r"index of stack .* must be a scalar, got \[3\]")
    assert stack[np.int32(1)] == stack[jnp.int32(1)] == stack[1]


def test_of_calls(group: ep.Group) -> None:
    layer: Any = group.register_layer("calls", top_k=2)
    idx, wrong = jnp.zeros((16, 2), jnp.int32), "a"
    refused(
        lambda: ep.dispatch(layer, jnp.ones((16, 16)), idx, handle=wrong),
        "handle must be an integer, got 'a'",
    )
    refused(lambda: ep.connect("none", timeout_s=wrong), "timeout_s must be a positive number")


def test_of_params() -> None:
    wi, wo = jnp.ones((8, 16, 2, 4)), jnp.ones((8, 4, 16))
    assert ep.MoEParams(wi=wi, wo=wo).router is None
    refused(lambda: ep.MoEParams(wi=wi), "needs wi and wo, got no wo")
    refused(ep.MoEParams, "got no wi and no wo")
    assert jax.tree.map(lambda _: None, ep.MoEParams(wi=wi, wo=wo)).wi is None


@pytest.mark.parametrize(
    ("slabs", "groups", "experts"), [(1, 3, 2), (1, 2, 3), (2, 2, 8), (3, 2, 4)]
)
def test_of_slabs_that_do_not_share_out_the_experts(slabs: int, groups: int, experts: int) -> None:
    """Each call would multiply by wrong experts, or leave some out."""
    lhs, rhs = jnp.ones((slabs, 8, 4)), jnp.ones((experts, 4, 2))
    sizes = jnp.ones((slabs, groups), jnp.int32)
    text = rf"\[{slabs}, {groups}\] has {slabs * groups} groups .* has {experts} experts"
    refused(lambda: ep.grouped_gemm(lhs, rhs, sizes), text)


def test_slabs_may_have_the_same_experts_or_each_its_own() -> None:
    lhs, sizes = jnp.ones((2, 8, 4)), jnp.full((2, 2), 4, jnp.int32)
    for experts in (2, 4):
        rhs = jnp.arange(experts, dtype=jnp.float32)[:, None, None] * jnp.ones((1, 4, 1))
        out = ep.grouped_gemm(lhs, rhs, sizes)
        np.testing.assert_array_equal(out[1, ::4, 0], 4 * np.arange(experts)[-2:])


@pytest.mark.parametrize(
    ("gated", "wrong", "text"),
    [
        (True, {"wi_bias": (8, 8)}, r"wi_bias must be \[E, 2, 4\] .*, got \[8, 8\]"),
        (False, {"wi_bias": (8, 2, 4)}, r"wi_bias must be \[E, 4\] .*, got \[8, 2, 4\]"),
        (True, {"wo_bias": (8, 4)}, r"wo_bias must be \[E, 16\] .*, got \[8, 4\]"),
        (True, {"router_bias": (4,)}, r"router_bias must be \[E=8\], got \[4\]"),
    ],
)
def test_of_biases(group: ep.Group, gated: bool, wrong: dict[str, Any], text: str) -> None:
    layer = group.register_layer("biases", top_k=2)
    params = ep.init_moe_params(jax.random.key(0), layer, 4, gated=gated)
    right = {"wi_bias": (8, 2, 4) if gated else (8, 4), "wo_bias": (8, 16), "router_bias": (8,)}
    biases = {name: jnp.zeros(shape) for name, shape in (right | wrong).items()}
    given = ep.MoEParams(params.router, params.wi, params.wo, **biases)
    refused(lambda: ep.moe(layer, jnp.ones((16, 16)), given, gated=gated), text)


def test_a_layer_and_a_layer_of_a_stack_have_no_name_in_common(group: ep.Group) -> None:
    stack = group.register_layer_stack("s", 3, top_k=2)
    for name in ("s[0]", "s[7]"):
        refused(lambda name=name: group.register_layer(name, top_k=2), "reads as a layer of stack")
    refused(lambda: group.register_layer_stack("t[1]", 2, top_k=2), "reads as a layer of stack")
    group.register_layer("q[1]", top_k=1)
    refused(lambda: group.register_layer_stack("q", 2, top_k=2), r"needs the name q\[1\]")
    ep.prepare(stack[0], jnp.zeros((16, 2), jnp.int32))  # is unchanged


def test_a_group_that_is_closed_under_tracing_says_so_and_is_open(session: ep.Session) -> None:
    group = session.create_group("traced", fakes.mesh_of({"ep": 2}), **SIZES)

    def closes(x: Any) -> Any:
        group.close()
        return x

    refused(lambda: jax.jit(closes)(1.0), "call this outside jit")
    assert not group.closed
    group.close()
    assert group.closed


def test_an_overflow_over_collectives_is_told_by_check_once(session: ep.Session) -> None:
    sizes = SIZES | {"recv_capacity_per_rank": 8, "on_overflow": "error"}
    group = session.create_group("full", fakes.mesh_of({"ep": 2}), **sizes)
    layer = group.register_layer("l", top_k=2)
    with pytest.raises(ep.CapacityOverflowError), translate_errors():
        jax.block_until_ready(ep.prepare(layer, jnp.zeros((16, 2), jnp.int32)))
    dispatch.runtime_tokens.clear()  # JAX would print the failed host callback again at exit
    with pytest.raises(ep.CapacityOverflowError, match="rank 0 would receive"):
        group.check()
    group.check()
    group.close()


RECIPES = r"recipe must be one of ep.recipes.BF16\(\), .*ep.recipes.MXFP8\(\).*, got "
BLOCK: list[tuple[dict[str, Any], str]] = [
    ({"recipe": "fp8"}, RECIPES + "'fp8'"),
    ({"recipe": ep.recipes.BlockScaling}, RECIPES + "the class ep.recipes.BlockScaling"),
    ({"compute_dtype": "bf16"}, "compute_dtype must be a dtype of JAX, .*did you mean 'bfloat16'"),
    ({"activation": "SwiGLU"}, 'got .SwiGLU.; type activation="silu", gated=True'),
    ({"activation": "slu"}, "got 'slu'; did you mean 'silu'"),
]


@pytest.mark.parametrize(("options", "text"), BLOCK, ids=str)
def test_of_a_block_says_what_to_type(group: ep.Group, options: dict[str, Any], text: str) -> None:
    layer = group.register_layer("typed", top_k=2)
    params = ep.init_moe_params(jax.random.key(0), layer, 4)
    refused(lambda: ep.moe(layer, jnp.ones((16, 16)), params, **options), text)


def test_of_experts_and_tokens_of_a_block(group: ep.Group) -> None:
    layer, x = group.register_layer("sizes", top_k=2), jnp.ones((16, 16))
    whole = ep.init_moe_params(jax.random.key(0), layer, 4)
    half = ep.MoEParams(whole.router, whole.wi[:4], whole.wo[:4])
    refused(lambda: ep.moe(layer, x, half), "params.wi must have the 8 experts .*, got 4")
    refused(lambda: ep.moe(layer, x[:15], whole), "2 shards .*; append zero tokens to x")
    idx = jnp.zeros((15, 2), jnp.int32)
    refused(lambda: ep.dispatch(layer, x[:15], idx), "2 shards .*; ep.pad_tokens pads")
    refused(
        lambda: ep.init_moe_params(jax.random.key(0), layer, 4, param_dtype="fp16"),
        "param_dtype must be a dtype of JAX, got 'fp16'; did you mean 'float16'",
    )


@pytest.mark.parametrize("devices", [slice(0, 4), slice(1, None, -1)], ids=["more", "reversed"])
def test_of_tokens_on_another_mesh(group: ep.Group, devices: slice) -> None:
    layer = group.register_layer("elsewhere", top_k=2)
    params = ep.init_moe_params(jax.random.key(0), layer, 4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[devices]), ("ep",))
    place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ep"))
    x = jax.device_put(jnp.ones((16, 16)), place)
    calls: list[Callable[[Any], Any]] = [lambda x: ep.moe(layer, x, params)]
    if mesh.size != group.mesh.size:  # under jit JAX reports only sizes
        calls.append(jax.jit(calls[0]))
    for call in calls:
        refused(lambda call=call: call(x), "x must be on the mesh of group 'wrong', 2 devices")


def test_unknown_arguments_name_the_closest_one() -> None:
    wrong: Any = {"hidden": 3}
    with pytest.raises(
        TypeError, match=r"estimate_memory\(\) .*'hidden'; did you mean 'hidden_size'"
    ):
        ep.estimate_memory(**wrong)


def test_more_experts_per_token_than_experts_are_said(
    session: ep.Session, caplog: pytest.LogCaptureFixture
) -> None:
    session.create_group("few", fakes.mesh_of({"ep": 2}), **(SIZES | {"max_top_k": 9})).close()
    assert "max_top_k=9 is above num_experts=8" in caplog.text


def test_a_layer_without_any_group_says_what_comes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layers.live_groups, "_groups", {})
    refused(lambda: ep.layer("moe/l"), r"'moe/l' needs an open group .* call ep.connect\(\)")


def test_layers_and_stacks_are_shown_in_one_line(group: ep.Group) -> None:
    layer = group.register_layer("shown", top_k=2)
    stack = group.register_layer_stack("shown_too", 3, top_k=2)
    assert repr(layer).startswith("EpLayer('wrong/shown', top_k=2, num_experts=8")
    assert repr(stack).startswith("LayerStack('wrong/shown_too', top_k=2")
    assert all(70 < len(repr(each)) <= 120 for each in (layer, stack))


def test_an_address_that_is_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = f"{tmp_path}/file is not a directory; give the daemon's socket directory"
    refused(lambda: ep.connect(f"unix://{tmp_path}/file"), text)


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_of_a_module_lists_its_own_options_too(group: ep.Group, module: str) -> None:
    made: Any = getattr(ep, module).MoEBlock
    layer = group.register_layer("module", top_k=2)
    options: dict[str, Any] = {"rngs": nnx.Rngs(0)} if module == "nnx" else {}
    refused(
        lambda: made(layer, 4, use_biass=True, **options),
        "use_biass is not an option of MoEBlock, .*separate.*keep.*did you mean 'use_bias'",
    )
