"""DuoAttention: what both kinds of heads hold while the answer grows, in tokens and bytes, and what the gates mix."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from baselines.duo_attention import DuoAttention
from baselines.duo_attention.gates import KEYS, GateLayer, attended, with_passkeys
from baselines.full import Full
from pqcache.api.drive import tokens
from pqcache.selective import Budget, ModelShape, Request, SelectiveCache, attach, generate_batch
from pqcache.selective.method import OnePass
from tests.baselines.drive import held, run
from tests.baselines.test_ragged import TOKEN

S, STEPS, SINKS, NEWEST = 300, 40, 4, 16
GATES = "0.1\t0.9\n0.2\t0.7\n\n0.4\t0.3\n"  # of three layers; the second heads of two are the largest


@pytest.mark.parametrize("turn", [0, 9])
def test_what_heads_hold(llama: PreTrainedModel, tmp_path: Path, turn: int) -> None:
    """release: a ratio of 0.4 of six heads are 6 - ceil(0.6 * 5) = 3. Of 340 tokens a streaming head keeps 4 + 16."""
    path = tmp_path / "gates.tsv"
    path.write_text(GATES)
    how = {"budget": Budget(ratio=0.4), "pattern": str(path)}
    method = DuoAttention(protocol="release", n_sink=SINKS, recent=NEWEST, **how)
    cache, full = run(llama, method, S, STEPS, turn=turn), run(llama, Full(), S, STEPS, turn=turn)
    end, whole = S + STEPS + turn, [[False, True], [False, True], [True, False]]
    near = [*range(SINKS), *range(end - NEWEST, end)]
    for layer, kinds in zip(cache.layers, whole, strict=True):
        assert held(layer) == [list(range(end)) if flag else near for flag in kinds]
    # the input of later layers depends on what the first one dropped
    for stored, known in zip(cache.layers[0].store.whole_rows().view(), full.layers[0].store.view(), strict=True):
        torch.testing.assert_close(stored[1, 0, :end], known[0, 1])
        torch.testing.assert_close(stored[0, 0, : len(near)], known[0, 0, near])
    assert sum(cache.content_by_tier().values()) == 3 * (end + SINKS + NEWEST) * TOKEN  # no positions
    assert cache.resident_bytes() == {"device": 3 * (512 + 256) * TOKEN}
    path.write_text("1 0\n")
    with pytest.raises(ValueError, match="3 lines of 2 numbers are this model's"):
        SelectiveCache(llama, DuoAttention(**how))


def test_the_aligned_budget_is_spent_whole() -> None:
    method = DuoAttention(budget=Budget(ratio=0.2), n_sink=32)
    whole, newest = method.kinds(1032, method.plan(1032, 0, 1), 90)  # 32 + 200 tokens a head: 50 newest, 14.2 heads
    assert whole == 14 and newest == 52  # 90 * 200 = 14 * 1000 + 76 * 52.6
    assert 14 * 1032 + 76 * (32 + 52) <= 90 * 232


def test_a_row_leaves_whose_heads_were_of_another_kind(llama: PreTrainedModel) -> None:
    method = DuoAttention(budget=Budget(ratio=0.5), n_sink=8, steps=2, calibration_tokens=64)
    rows = [tokens(120, 1), tokens(6, 2)]  # the short one keeps all tokens in every head
    for order in (rows, rows[::-1]):
        both = generate_batch(llama, method, [Request(row, 3 if row is rows[0] else 8) for row in order])
        alone = [generate_batch(llama, method, [Request(row, 3 if row is rows[0] else 8)])[0] for row in order]
        assert [one.token_ids for one in both] == [one.token_ids for one in alone]


@torch.no_grad()
def test_gates_mix_full_and_streaming_attention(llama: PreTrainedModel) -> None:
    text = with_passkeys(torch.tensor(tokens(128, 5)), torch.Generator().manual_seed(1))
    asked = text[-KEYS * 4 :].unfold(0, 4, 4)
    assert len(text) == 128 and all((text[:-40].unfold(0, 4, 1) == key).all(1).any() for key in asked)
    full, outputs = attended(llama, text[None])
    apart = torch.arange(128)[:, None] - torch.arange(128)
    seen = (apart >= 0) & ((torch.arange(128) < 8) | (apart < 16))
    mask = torch.zeros(1, 1, 128, 128, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    streaming = llama.get_decoder()(input_ids=text[None], attention_mask=mask)[0]
    shape = ModelShape.of(llama.config)
    for gate, want in ((1.0, full), (0.0, streaming)):
        layers = [GateLayer(i, shape, torch.full((2,), gate), out, seen) for i, out in enumerate(outputs)]
        with attach(llama):
            cache = SelectiveCache(llama.config, OnePass(layers))
            torch.testing.assert_close(llama.get_decoder()(input_ids=text[None], past_key_values=cache)[0], want)
