"""What people pass to `generate`, on SmolLM2's architecture: streamers, stop strings, padded chats on one cache."""

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import pqcache
from pqcache.api.drive import small_model
from pqcache.embedded import load_tokenizer
from tests.test_api import GREEDY, SETTINGS
from tests.thin import thin


@pytest.fixture(scope="module")
def smol() -> PreTrainedModel:
    """SmolLM2-135M's architecture with two of its layers, over the vocabulary of the embedded model."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2, "tie_word_embeddings": True}
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "rope_theta": 100000.0, "initializer_range": 0.05}
    return small_model(transformers.LlamaConfig(vocab_size=len(load_tokenizer()), **heads, **sizes))


@pytest.mark.parametrize("name", thin(SETTINGS, 4))
@pytest.mark.rest
def test_streamers_and_stop_strings(smol: PreTrainedModel, name: str) -> None:
    tokenizer, how = load_tokenizer(), {"max_new_tokens": 10, **GREEDY}
    ids = tokenizer("The red door is here. " * 20, return_tensors="pt")["input_ids"]
    with pqcache.use(smol, name, **SETTINGS[name]):
        new = smol.generate(ids, **how)[0, ids.shape[1] :]
        streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
        streamed = smol.generate(ids, streamer=streamer, **how)[0, ids.shape[1] :]
        stop = tokenizer.decode(new[4:6])
        stopped = smol.generate(ids, stop_strings=[stop], tokenizer=tokenizer, **how)[0, ids.shape[1] :]
    assert torch.equal(streamed, new) and "".join(streamer) == tokenizer.decode(new)
    assert stop in tokenizer.decode(stopped) and torch.equal(stopped, new[: len(stopped)]) and len(stopped) <= 6


@pytest.mark.parametrize("name", thin(["pqcache", "snapkv"], 2))
@pytest.mark.rest
def test_a_padded_batch_of_chats_goes_on_after_its_assistant_turns(smol: PreTrainedModel, name: str) -> None:
    """Each row's second answer on the batch's cache is that of the row alone on its own."""
    tokenizer, how = load_tokenizer(), {"max_new_tokens": 6, **GREEDY}

    def chat(*turns: tuple[str, str]) -> torch.Tensor:
        said = [{"role": role, "content": content} for role, content in turns]
        return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]

    def answers(ids: torch.Tensor) -> torch.Tensor:
        cache, mask = session.cache(), (ids >= 0).long()
        first = smol.generate(ids.clamp_min(0), attention_mask=mask, past_key_values=cache, **how)
        history = torch.cat([first, turn.repeat(len(ids), 1)], 1)
        mask = torch.nn.functional.pad(mask, (0, history.shape[1] - mask.shape[1]), value=1)
        return smol.generate(history, attention_mask=mask, past_key_values=cache, **how)[:, -6:]

    rows = [chat(("user", f"The {word} door is here. " * n + "Where?")) for word, n in (("red", 20), ("blue", 14))]
    turn, width = chat(("assistant", ""), ("user", "And then?")), max(ids.shape[1] for ids in rows)
    both = torch.cat([torch.nn.functional.pad(ids, (width - ids.shape[1], 0), value=-1) for ids in rows])
    with pqcache.use(smol, name, **SETTINGS[name]) as session:
        assert torch.equal(answers(both), torch.cat([answers(ids) for ids in rows]))
