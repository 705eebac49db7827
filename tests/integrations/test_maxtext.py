"""MaxText with the patch of its page trains as MaxText without: the same losses, ten steps each.

By command: TEST_MAXTEXT is the wheel of the page's release, and the Python that runs this has what
MaxText's layers import; `--log-cli-level=INFO` says how far losses differ.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import logging
import os
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from child_programs import run_python
from integrations import maxtext_sources
from integrations.train_maxtext import REPLAYED

from ep_runtime_bench.base.clients import warm_daemon
from ep_runtime_client.integrations.maxtext import REFUSED
from ep_runtime_client.jobs.members import reserved_coordinator

_log = logging.getLogger(__name__)
MEMBER = Path(__file__).with_name("train_maxtext.py")
RUN_TIMEOUT_S = 900.0
MOST_LINES = 10

COMMON: dict[str, Any] = {
    "dataset_type": "synthetic",
    "steps": 10,
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "tokenizer_type": "tiktoken",
    "attention": "dot_product",
    "override_model_config": True,
    "remat_policy": "full",
    "sharding_tolerance": 1.0,  # small models leave much unsharded
    "decoder_block": "mixtral",
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 4,
    "head_dim": 16,
    "base_mlp_dim": 64,
    "base_moe_mlp_dim": 64,
    "base_num_decoder_layers": 2,
    "vocab_size": 256,
    "max_target_length": 64,
    "per_device_batch_size": 1,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sparse_matmul": False,
    "capacity_factor": -1.0,
    "load_balance_loss_weight": 0.01,
    "learning_rate": 0.003,
    "dtype": "float32",
    "weight_dtype": "float32",
    "matmul_precision": "highest",
    "ici_fsdp_parallelism": 2,
    "ici_expert_parallelism": 4,
}
DEEPSEEK = {
    "model_name": "deepseek3-test",
    "decoder_block": None,  # the model's config sets it
    "head_dim": None,
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_bias_update_rate": 0.001,
}
QWEN3 = {
    "model_name": "qwen3-30b-a3b",
    "decoder_block": None,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "fsdp and ep": {},
    "ep and tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2},
    "fsdp and ep and tensor": {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2},
    "context and ep": {"ici_fsdp_parallelism": 1, "ici_context_parallelism": 2},
    "experts over fsdp": {
        "shard_exp_on_fsdp": True,
        "ici_fsdp_parallelism": 4,
        "ici_expert_parallelism": 2,
    },
    "experts over two fsdp axes": {
        "use_2d_fsdp_sharding": True,
        "ici_fsdp_transpose_parallelism": 2,
        "ici_expert_parallelism": 2,
    },
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_batch_size": 2},
    "evaluation of larger batches": {
        "eval_interval": 4,
        "eval_steps": 2,
        "eval_per_device_batch_size": 2,
    },
    "router replay": {"replayed": True},
    "fused weights": {"prefuse_moe_weights": True},
    "deepseek3": DEEPSEEK,
    "deepseek3 with accumulation": {
        **DEEPSEEK,
        "gradient_accumulation_steps": 2,
        "per_device_batch_size": 2,
    },
    "deepseek3 with a loss of sequences": {**DEEPSEEK, "moe_use_megatron_seq_aux_loss": True},
    "qwen3 on fsdp and ep and tensor": {
        **QWEN3,
        "ici_expert_parallelism": 2,
        "ici_tensor_parallelism": 2,
    },
    "gpt-oss": {
        "decoder_block": "gpt_oss",
        "mlp_bias": True,
        "routed_bias": True,
        "mlp_activations_limit": 7.0,
    },
    "pipeline": {
        "ici_fsdp_parallelism": 1,
        "ici_pipeline_parallelism": 2,
        "base_num_decoder_layers": 4,
        "per_device_batch_size": 4,
        "num_pipeline_microbatches": 2,
        "num_layers_per_pipeline_stage": 1,
        "load_balance_loss_weight": 0.0,  # its pipeline does not return that loss
        "init_weights_seed": 1,  # with seed 0 rounding grows to 3e-6 of the loss in ten steps
    },
    "bf16": {"dtype": "bfloat16"},
}


def test_the_patch_stays_small() -> None:
    lines = maxtext_sources.patch().splitlines()
    changed = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert len(changed) <= MOST_LINES
    assert f"{len(changed)} lines" in maxtext_sources.PAGE.read_text(encoding="utf-8")


def options_of_page() -> dict[str, set[str]]:
    """Options by their effect: supported, without effect, or refused."""
    page = maxtext_sources.PAGE.read_text(encoding="utf-8")
    options = page.partition("## Options")[2].partition("\n## ")[0]
    taken, effectless, refused = re.split(r"\*\*No effect:|\| error unless off", options)
    names = (set(re.findall("`([a-z0-9_*]+)`", text)) for text in (taken, effectless))
    rows = [line.split(" | ")[0] for line in refused.splitlines() if line.startswith("| `")]
    return {
        **dict(zip(("taken", "without effect"), names, strict=True)),
        "refused": set(re.findall("`([a-z0-9_]+)`", " ".join(rows))),
    }


def test_the_page_has_every_refused_option_with_its_reason() -> None:
    page = maxtext_sources.PAGE.read_text(encoding="utf-8")
    assert options_of_page()["refused"] == {*REFUSED}
    for name, reason in REFUSED.items():
        (line,) = (line for line in page.splitlines() if f"`{name}`" in line and "| " in line)
        assert line.endswith(f" | {reason} |")


@pytest.mark.integrations
def test_every_option_of_its_experts_is_on_the_page_once(patched: Path) -> None:
    tree = ast.parse((patched / "maxtext/configs/types.py").read_text(encoding="utf-8"))
    classes = [each for each in tree.body if isinstance(each, ast.ClassDef)]
    fields = {
        field.target.id
        for each in classes
        if each.name in ("MoEGeneral", "MoEKernels", "DeepSeekMoE")
        for field in each.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    fields.remove("ep_runtime")
    assert len(fields) > 100
    by_kind = options_of_page()
    for name in fields:
        kinds = [
            kind
            for kind, patterns in by_kind.items()
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        ]
        assert len(kinds) == 1, f"{name}: {kinds}"
    said = set().union(*by_kind.values())
    gone = {name for name in said if not any(fnmatch.fnmatch(each, name) for each in fields)}
    elsewhere = [name for name in gone if name.startswith(("custom_mesh", "moe_", "quantization"))]
    assert gone == {*elsewhere}, "the page names options that MaxText does not have"


@pytest.mark.integrations
def test_an_option_of_other_experts_is_an_error_with_its_name(
    patched: Path, tmp_path: Path
) -> None:
    words = words_of(tmp_path, {"ep_runtime": True, "capacity_factor": 1.5})
    with pytest.raises(AssertionError, match="needs MaxText's capacity_factor to be off, got 1.5"):
        run(patched, [str(MEMBER), "none", "0", "1", *words])


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("TEST_MAXTEXT")
    if not given:
        pytest.skip("TEST_MAXTEXT does not name a wheel of MaxText")
    return maxtext_sources.patched_copy(Path(given), tmp_path_factory.mktemp("maxtext"))


def words_of(out: Path, settings: dict[str, Any]) -> list[str]:
    """Words for MaxText's command line; figures go to the file `metrics` in `out`."""
    metrics = out / "metrics"
    metrics.touch()
    given = {**COMMON, **settings, "run_name": "test", "base_output_directory": out}
    given["metrics_file"] = metrics
    replayed = [REPLAYED] if given.pop("replayed", False) else []
    return replayed + [f"{name}={value}" for name, value in given.items() if value is not None]


def read(out: Path) -> dict[str, list[float]]:
    """Losses of training and of evaluation, by name."""
    lines = (out / "metrics").read_text().splitlines()
    steps = [json.loads(line) for line in lines if line.strip()]
    names = ("learning/loss", "eval/avg_loss")
    return {name: [step[name] for step in steps if name in step] for name in names}


def run(patched: Path, words: Sequence[str], **environment: str) -> None:
    """`python words...` in the patched copy, to its end."""
    path = f"{patched}:{os.environ['PYTHONPATH']}"
    how = {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **environment}
    run_python(*words, cwd=patched, limit_s=RUN_TIMEOUT_S, **how)


def losses(patched: Path, out: Path, settings: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the losses of one process with eight devices."""
    run(patched, [str(MEMBER), "none", "0", "1", *words_of(out, settings)])
    return read(out)


@pytest.mark.integrations
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_maxtext(patched: Path, tmp_path: Path, case: str) -> None:
    of_both = []
    for ours in (False, True):
        out = tmp_path / str(ours)
        out.mkdir()
        # Our path can replace each of MaxText's.
        paths = {"ep_runtime": ours, "sparse_matmul": ours}
        of_both.append(losses(patched, out, {**CASES[case], **paths}))
    stock, mine = of_both
    trained = stock["learning/loss"]
    evaluates = "eval_interval" in CASES[case]
    assert bool(stock["eval/avg_loss"]) == evaluates
    # Every evaluation starts the file of figures again.
    assert len(trained) == COMMON["steps"] or evaluates
    assert trained[-1] < trained[0]
    tolerance = 1e-3 if "dtype" in CASES[case] else 1e-6
    apart = 0.0
    for name, wanted in stock.items():
        np.testing.assert_allclose(mine[name], wanted, rtol=tolerance, atol=0, err_msg=name)
        apart = max([apart, *np.abs(np.subtract(mine[name], wanted))])
    _log.info("%s: losses differ by %.2g at most", case, apart)


@pytest.mark.integrations
@pytest.mark.timeout(7 * RUN_TIMEOUT_S)
@pytest.mark.parametrize("case", ["fsdp and ep", "deepseek3"])
def test_checkpoints_work_both_ways(patched: Path, tmp_path: Path, case: str) -> None:
    """Orbax's checkpoint of step 5, by MaxText or by ours, is restored by each and on another mesh.

    The same trainer goes on bit for bit; another one or another mesh within 1e-6 of the losses.
    """
    saving = {"enable_checkpointing": True, "async_checkpointing": False, "checkpoint_period": 5}
    settings = {**CASES[case], **saving}
    other_mesh = {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 8}

    def trained(name: str, saved: Path | None = None, **more: Any) -> list[float]:
        out = tmp_path / name
        checkpoints = out / "test/checkpoints"
        if saved:
            shutil.copytree(saved / "5", checkpoints / "5")
        else:
            out.mkdir()
        return losses(patched, out, {**settings, **more})["learning/loss"]

    whole = {ours: trained(f"whole {ours}", ep_runtime=ours) for ours in (False, True)}
    for first in (False, True):
        saved = tmp_path / f"whole {first}/test/checkpoints"
        for then in (False, True):
            restored = trained(f"{first} {then}", saved, ep_runtime=then)
            assert len(restored) == 4
            tolerance = 0.0 if first == then else 1e-6
            np.testing.assert_allclose(restored, whole[then][6:], rtol=tolerance, atol=0)
            apart = np.abs(np.subtract(restored, whole[then][6:])).max()
            _log.info("%s, ours %s then %s: losses differ by %.2g", case, first, then, apart)
    moved = trained(
        "moved", tmp_path / "whole False/test/checkpoints", ep_runtime=True, **other_mesh
    )
    np.testing.assert_allclose(moved, whole[False][6:], rtol=1e-6, atol=0)


@pytest.mark.integrations
@pytest.mark.timeout(3 * RUN_TIMEOUT_S)
@pytest.mark.parametrize("axis", ["expert", "fsdp"])
def test_two_processes_train_as_one(patched: Path, tmp_path: Path, axis: str) -> None:
    """2 x 4 devices under jax.distributed, with a daemon of the node: the losses of 1 x 8.

    The axis is the one that goes over both processes.
    """
    whole = {"ici_fsdp_parallelism": 1, "ici_expert_parallelism": 8}
    settings = {**(whole if axis == "expert" else {}), "ep_runtime": True}
    (tmp_path / "one").mkdir()
    one = losses(patched, tmp_path / "one", settings)["learning/loss"]
    with (
        warm_daemon() as address,
        reserved_coordinator() as coordinator,
        ThreadPoolExecutor(2) as pool,
    ):

        def member(index: int) -> list[float]:
            out = tmp_path / str(index)
            out.mkdir()
            words = [str(MEMBER), coordinator, str(index), "2", *words_of(out, settings)]
            run(patched, words, EP_RUNTIME_ADDRESS=address)
            return read(out)["learning/loss"]

        of_both = [*pool.map(member, range(2))]
    assert len(one) == COMMON["steps"]
    for mine in of_both:
        np.testing.assert_allclose(mine, one, rtol=1e-6, atol=0)
    apart = np.abs(np.subtract(of_both, one)).max()
    _log.info("two processes, %s over both: losses differ by %.2g at most", axis, apart)
