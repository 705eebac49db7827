"""What the figures of grouped math read off programs."""

from __future__ import annotations

import grouped_figures

import ep_runtime as ep


def test_a_step_has_as_many_operations_with_256_experts_as_with_8() -> None:
    with ep.connect("none") as session:
        few, many = (
            grouped_figures.step_of(session, count, None).as_text().count(" = stablehlo.")
            for count in (8, 256)
        )
    assert 0 < many <= few


def test_gathered_bytes_are_those_of_results_by_dtype() -> None:
    text = """
      %a = u8[4,8]{1,0} all-gather(%x), dimensions={0}
      ROOT %b = (f32[2]{0}, u8[3]{0}) all-gather(%y, %z), dimensions={0}
      %c = f32[100]{0} all-reduce(%w), to_apply=%sum
    """
    assert grouped_figures.gathered(text) == {"u8": 35, "f32": 8}
