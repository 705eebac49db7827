"""Options of the router, against their definition in NumPy: values and gradients."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

import ep_runtime as ep

TOKENS, EXPERTS, TOP_K = 30, 12, 4
FACTORS = np.random.default_rng(9).standard_normal((TOKENS, TOP_K)).astype(np.float32)
BIAS = np.linspace(-0.6, 0.7, EXPERTS).astype(np.float32)


def routed(logits: Any, top_k: int, *, expert_bias: Any = None, **router: Any) -> ep.Routing:
    return ep.route(logits, top_k, router=ep.Router(**router), expert_bias=expert_bias)


@pytest.fixture(scope="module")
def logits() -> Any:
    return 2 * np.random.default_rng(4).standard_normal((TOKENS, EXPERTS)).astype(np.float32)


SCORES = {
    "softmax": functools.partial(softmax, axis=-1),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.log1p(np.exp(x))),
}


@dataclasses.dataclass(frozen=True)
class Router:
    """The definition in f64. Weights are scores (with softmax: shares of all), normalised or not.

    Attributes:
        score: name in SCORES.
        by_logits: softmax whose choice is made on logits plus bias.
        normalize: whether weights sum to one.
        groups: of routing; `allowed` of them hold the chosen, by the sum of `summed` scores.
    """

    score: str
    by_logits: bool = False
    normalize: bool = True
    bias: Any = 0.0
    groups: int = 1
    allowed: int = 1
    summed: int = 1

    def chosen(self, logits: Any) -> Any:
        wide = np.asarray(logits, np.float64)
        choice = (wide if self.by_logits else SCORES[self.score](wide)) + self.bias
        per_group = choice.reshape(len(choice), self.groups, -1)
        ranked = np.sort(per_group, -1)[..., -self.summed :].sum(-1)
        best = np.argsort(-ranked, -1, kind="stable")[:, : self.allowed]
        inside = (np.arange(self.groups)[:, None] == best[:, None, :]).any(-1)
        choice = np.where(inside[..., None], per_group, -np.inf).reshape(choice.shape)
        return np.argsort(-choice, -1, kind="stable")[:, :TOP_K]

    def weights(self, logits: Any, idx: Any) -> Any:
        picked = np.take_along_axis(SCORES[self.score](np.asarray(logits, np.float64)), idx, -1)
        return picked / picked.sum(-1, keepdims=True) if self.normalize else picked

    def gradient(self, logits: Any, idx: Any) -> Any:
        """Gradient of sum(weights * FACTORS), by finite differences in f64."""
        wide, step = np.asarray(logits, np.float64), 1e-5
        grad = np.zeros_like(wide)
        for expert in range(EXPERTS):
            move = step * (np.arange(EXPERTS) == expert)
            moved = [self.weights(wide + side * move, idx) for side in (1, -1)]
            grad[:, expert] = ((moved[0] - moved[1]) * FACTORS).sum(-1) / (2 * step)
        return grad


# Arguments of `route`, and the router that they mean.
CASES: dict[str, tuple[dict[str, Any], Router]] = {
    "softmax over the picked": ({}, Router("softmax", by_logits=True)),
    "the same when asked": ({"normalize_weights": True}, Router("softmax", by_logits=True)),
    "shares of all, chosen by logits and bias": (
        {"normalize_weights": False, "expert_bias": BIAS},
        Router("softmax", by_logits=True, normalize=False, bias=BIAS),
    ),
    "shares of all": ({"use_pre_softmax": True}, Router("softmax", normalize=False)),
    "biased softmax with sums of one": (
        {"use_pre_softmax": True, "normalize_weights": True, "expert_bias": BIAS},
        Router("softmax", bias=BIAS),
    ),
    "biased softmax as it is": (
        {"use_pre_softmax": True, "expert_bias": BIAS},
        Router("softmax", normalize=False, bias=BIAS),
    ),
    "sigmoid": ({"score_function": "sigmoid"}, Router("sigmoid")),
    "sigmoid as it is": (
        {"score_function": "sigmoid", "normalize_weights": False, "expert_bias": BIAS},
        Router("sigmoid", normalize=False, bias=BIAS),
    ),
    "square root of softplus": (
        {"score_function": "sqrtsoftplus", "expert_bias": BIAS},
        Router("sqrtsoftplus", bias=BIAS),
    ),
    "square root of softplus as it is": (
        {"score_function": "sqrtsoftplus", "normalize_weights": False},
        Router("sqrtsoftplus", normalize=False),
    ),
    "groups by their best two": (
        {
            **{"score_function": "sigmoid", "expert_bias": BIAS, "num_groups": 3},
            **{"group_topk": 2, "group_score_topk": 2},
        },
        Router("sigmoid", bias=BIAS, groups=3, allowed=2, summed=2),
    ),
    "groups by their best one": (
        {"use_pre_softmax": True, "num_groups": 4, "group_topk": 2, "group_score_topk": 1},
        Router("softmax", normalize=False, groups=4, allowed=2, summed=1),
    ),
    "groups that are full to the last expert": (
        {"score_function": "sigmoid", "num_groups": 6, "group_topk": 2},
        Router("sigmoid", groups=6, allowed=2, summed=2),
    ),
    "groups whose number does not divide top_k": (
        {"score_function": "sigmoid", "num_groups": 4, "group_topk": 3, "group_score_topk": 3},
        Router("sigmoid", groups=4, allowed=3, summed=3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_option_is_its_definition(logits: Any, name: str) -> None:
    options, router = CASES[name]

    def loss(logits: Any) -> Any:
        routing = routed(logits, TOP_K, **options)
        return (routing.topk_weights * FACTORS).sum(), routing

    grad, routing = jax.jit(jax.grad(loss, has_aux=True))(logits)
    idx = router.chosen(logits)
    np.testing.assert_array_equal(routing.topk_idx, idx)
    np.testing.assert_allclose(routing.topk_weights, router.weights(logits, idx), rtol=2e-5)
    np.testing.assert_allclose(grad, router.gradient(logits, idx), rtol=1e-3, atol=2e-6)
    shares = SCORES[router.score](np.asarray(logits, np.float64))
    shares = shares / shares.sum(-1, keepdims=True)
    np.testing.assert_allclose(routing.probs, shares, rtol=2e-5)


def test_group_scores_change_the_choice(logits: Any) -> None:
    """Otherwise the cases above could not tell apart different numbers of summed scores."""
    chosen = [
        routed(logits, TOP_K, num_groups=4, group_topk=2, group_score_topk=n).topk_idx
        for n in (1, 2, 3)
    ]
    assert not (chosen[0] == chosen[1]).all()
    assert not (chosen[1] == chosen[2]).all()
    default = routed(logits, TOP_K, num_groups=4, group_topk=2)
    np.testing.assert_array_equal(default.topk_idx, chosen[1])


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_one_expert_has_its_score_for_weight_unless_asked(logits: Any, score: str) -> None:
    best = SCORES[score](logits).max(-1, keepdims=True)
    for normalize, want in ((None, best), (False, best), (True, np.ones_like(best))):
        got = routed(logits, 1, score_function=score, normalize_weights=normalize)
        np.testing.assert_allclose(got.topk_weights, want, rtol=2e-5)


def test_weights_are_scaled_after_they_are_normalised(logits: Any) -> None:
    for score in SCORES:
        options = {"score_function": score, "normalize_weights": True, "scaling_factor": 2.5}
        weights = routed(logits, TOP_K, **options).topk_weights
        np.testing.assert_allclose(weights.sum(-1), 2.5, rtol=1e-5)


def test_square_roots_of_softplus_at_the_ends_of_f32() -> None:
    far = np.array([[-np.inf, -300.0, -90.0, -20.001, -19.999, 0.0, 80.0, 1e4]], np.float32)

    def weight(logits: Any, expert: int) -> Any:
        routing = routed(logits, 8, score_function="sqrtsoftplus", normalize_weights=False)
        return jnp.where(routing.topk_idx == expert, routing.topk_weights, 0.0).sum()

    wide = np.asarray(far[0], np.float64)
    want = np.sqrt(np.logaddexp(wide, 0.0))
    # sigmoid(x) / (2 sqrt(s)), which is sqrt(s) / 2 if both are exp(x).
    low, sigmoid = wide < -40, np.exp(-np.logaddexp(0.0, -wide))
    slope = np.where(low, want, sigmoid / np.where(low, 1.0, want)) / 2
    for expert in range(8):
        got, grad = jax.jit(jax.value_and_grad(weight), static_argnums=1)(far, expert)
        np.testing.assert_allclose(got, want[expert], rtol=1e-5, atol=1e-37)
        wanted = slope[expert] * (np.arange(8) == expert)
        np.testing.assert_allclose(grad[0], wanted, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("low", [-46.0, -90.0, -150.0, -np.inf])
def test_scores_of_nearly_nothing_have_finite_gradients(score: str, low: float) -> None:
    """Covers a masked token, and a router with extreme logits."""

    def loss(logits: Any) -> Any:
        routing = routed(logits, 2, score_function=score)
        assert routing.probs is not None
        return routing.topk_weights[0, 0] + routing.probs[0, 0]

    grad = jax.jit(jax.grad(loss))(np.full((1, 4), low, np.float32))
    assert np.isfinite(np.asarray(grad)).all()


def test_shares_too_small_to_divide_by_stay_finite() -> None:
    """A bias, or routing groups, may choose experts whose softmax share is 0."""
    logits = np.array([[0.0, 0.0, -200.0, -210.0]], np.float32)
    bias = np.array([0.0, 0.0, 2.0, 2.0], np.float32)

    def weights(logits: Any) -> Any:
        router = ep.Router(use_pre_softmax=True, normalize_weights=True)
        routing = ep.route(logits, 2, router=router, expert_bias=bias)
        return routing.topk_weights.sum(), routing.topk_idx

    (total, idx), grad = jax.jit(jax.value_and_grad(weights, has_aux=True))(logits)
    np.testing.assert_array_equal(idx, [[2, 3]])
    np.testing.assert_array_equal(total, 0)
    np.testing.assert_array_equal(grad, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"group_score_topk": 2}, "group_score_topk=2 goes with num_groups and group_topk"),
        (
            {"num_groups": 4, "group_topk": 2, "group_score_topk": 4},
            r"must be 1 to 3 \(the experts of a routing group\), got 4",
        ),
        ({"num_groups": 4, "group_topk": 2, "group_score_topk": 0}, "must be at least 1"),
        ({"num_groups": 4, "group_topk": 3}, "divide top_k=4 unless group_score_topk is given"),
        (
            {"num_groups": 4, "group_topk": 1, "group_score_topk": 2},
            "top_k=4 over group_topk=1 routing groups asks for 4 experts of a group of 3",
        ),
        ({"normalize_weights": 1}, "normalize_weights must be None, True or False, got 1"),
        ({"num_groups": 4}, "give both"),
        ({"num_groups": 5, "group_topk": 1}, "does not divide the 12 experts"),
        ({"expert_bias": np.zeros(3)}, r"expert_bias must be \[12\]"),
        ({"top_k": 13}, "top_k must be 1 to 12"),
        ({"top_k": 2.0}, "top_k must be an integer, got 2.0"),
    ],
)
def test_arguments_that_do_not_fit(logits: Any, arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        routed(logits, **{"top_k": TOP_K, **arguments})


def test_a_router_is_checked_when_it_is_made() -> None:
    assert hash(ep.Router(scaling_factor=2)) == hash(ep.Router(scaling_factor=2.0))
    for wrong, text in (
        ({"score_function": "tanh"}, "score_function must be one of"),
        ({"use_pre_softmax": 1}, "use_pre_softmax must be True or False, got 1"),
        ({"num_groups": 4, "group_topk": 5}, "group_topk must be 1 to num_groups=4, got 5"),
        ({"num_groups": 2.5, "group_topk": 1}, "num_groups must be an integer, got 2.5"),
        ({"scaling_factor": jnp.ones(())}, "scaling_factor must be a number"),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=text):
            ep.Router(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="router must be an ep.Router, got 'sigmoid'"):
        ep.route(jnp.zeros((3, 4)), 2, router="sigmoid")  # type: ignore[arg-type]


def test_spellings_before_routers_name_the_new_ones(logits: Any) -> None:
    layer: Any = ep.LayerSpec("moe", top_k=2, num_experts=EXPERTS, hidden_size=8)
    params = ep.init_moe_params(jax.random.key(0), layer, 8)
    route, moe = functools.partial(ep.route, logits, 2), functools.partial(ep.moe, layer, logits)
    for field in dataclasses.fields(ep.Router):
        text = rf"^{field.name}= is gone since .*router=ep.Router\({field.name}=...\)"
        for call in (route, functools.partial(moe, params)):
            with pytest.raises(ep.InvalidArgumentError, match=text):
                call(**{field.name: field.default})
    for name, new in (
        ("apply_topk_weights_early", 'weights_at="hidden"'),
        ("apply_topk_weights_to_input", 'weights_at="input"'),
    ):
        with pytest.raises(ep.InvalidArgumentError, match=f"^{name}= is gone .*{new}"):
            moe(params, **{name: True})
    with pytest.raises(TypeError, match="'rooter'; did you mean 'router'"):
        moe(params, rooter=ep.Router())
