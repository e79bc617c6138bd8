"""`pqcache.use` and `pqcache.methods`: a session answers as the harness's own loop does, and leaves nothing behind."""

import copy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

import pqcache
from pqcache.api import session as sessions
from pqcache.api.drive import small_model
from pqcache.embedded import load_tokenizer, model_dir
from pqcache.registry import METHODS
from pqcache.selective import SelectiveCache, attach, generate
from pqcache.selective.attach import check_config
from tests.invariants.cases import SMALL
from tests.invariants.conftest import build
from tests.thin import thin

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
# method -> options and budget for prompts of about a hundred tokens
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "pqcache": {"n_sink": 8, "b": 4, "store": "host", "budget": 0.25},
    "snapkv": {"n_sink": 4, "w": 8, "budget": 64},
    "kivi": {"group": 8, "residual": 16},
}


def tokens(n: int, seed: int) -> torch.Tensor:
    return torch.randint(3, 128, (1, n), generator=torch.Generator().manual_seed(seed))


def state(model: PreTrainedModel) -> tuple:
    """Everything that a session may touch."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return (
        model.config._attn_implementation,
        sorted(model.__dict__),
        hooks,
        [sorted(m.__dict__) for m in model.modules()],
    )


# -- the same answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_generate_answers_as_the_harness(name: str, family: str) -> None:
    model, ids = build(family), tokens(120, 1)
    before = state(model)
    with pqcache.use(model, name, **SETTINGS[name]) as session:
        assert state(model) != before
        out = model.generate(ids, max_new_tokens=10, **GREEDY)
    assert state(model) == before
    expected = generate(model, session.method, ids, max_new_tokens=10)
    assert out[0, 120:].tolist() == expected.token_ids
    report = session.report()
    assert (report.prompt_tokens, report.new_tokens, report.rows) == (120, 10, 1)
    assert report.attended_tokens == expected.attended_tokens
    assert session.bytes == report.bytes == expected.resident_bytes
    assert 0 < sum(report.content_bytes.values()) <= sum(report.bytes.values())
    assert report.bytes_per_step == expected.bytes_per_step
    assert report.full_bytes == 129 * 2 * 3 * 2 * (16 if family == "llama" else 32) * 8
    assert name in str(report) and "120 prompt tokens" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    ],
    ids=["greedy", "beams", "samples"],
)
def test_full_is_the_model_without_a_session(options: dict) -> None:
    """Beams, samples of one seed and a padded batch."""
    qwen = build("qwen3")
    ids = torch.cat([torch.cat([torch.zeros(1, 20, dtype=torch.long), tokens(40, 2)], 1), tokens(60, 3)])
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "max_new_tokens": 8,
        "eos_token_id": None,
        **options,
    }

    def answer() -> torch.Tensor:
        torch.manual_seed(7)
        return qwen.generate(**inputs)

    stock = answer()
    with pqcache.use(qwen, "full") as session:
        assert torch.equal(answer(), stock)
    assert session.report().rows == 2 * options.get("num_beams", options.get("num_return_sequences", 1))
    with pqcache.use(qwen, "pqcache", **SETTINGS["pqcache"]):
        other = answer()
        assert not torch.equal(other, stock)  # the method is at work
        assert not options["do_sample"] or torch.equal(answer(), other)  # and repeats itself


@pytest.mark.parametrize("mask", [True, False], ids=["mask", "inferred"])
def test_padded_rows_answer_as_each_alone(llama: PreTrainedModel, mask: bool) -> None:
    """Also where every row begins with padding, and where generate infers the padding from the tokens."""
    rows = [tokens(90, 4), tokens(60, 5)]
    ids = torch.cat([torch.nn.functional.pad(row, (100 - row.shape[1], 0)) for row in rows])
    given = {"attention_mask": (ids != 0).long()} if mask else {}
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 2, "min_new_tokens": 8}
    with pqcache.use(llama, "pqcache", **SETTINGS["pqcache"]):
        both = llama.generate(ids, **given, **options)
        alone = [llama.generate(row, **options)[0, -8:] for row in rows]
    assert torch.equal(both[:, -8:], torch.stack(alone))


@pytest.mark.parametrize("name", ["full", "oracle"])
def test_a_conversation_is_one_long_prompt(llama: PreTrainedModel, name: str) -> None:
    """Where the method plans anew at each turn and its selection needs nothing that the first turn left behind."""
    options = {"n_sink": 8, "budget": 0.25} if name == "oracle" else {}
    first, second = tokens(80, 6), tokens(40, 7)
    with pqcache.use(llama, name, **options) as session:
        chat = session.cache()
        history = torch.cat([llama.generate(first, past_key_values=chat, max_new_tokens=1, **GREEDY), second], 1)
        turns = llama.generate(history, past_key_values=chat, max_new_tokens=8, **GREEDY)
        assert torch.equal(turns, llama.generate(history, max_new_tokens=8, **GREEDY))
        alone = llama.generate(
            first, past_key_values=session.cache(), max_new_tokens=1, return_dict_in_generate=True, **GREEDY
        )
        mask = torch.ones_like(history)
        new_tokens = history[:, 80:]  # the new tokens alone, under a mask of all
        more = llama.generate(
            new_tokens, attention_mask=mask, past_key_values=alone.past_key_values, max_new_tokens=8, **GREEDY
        )
        assert torch.equal(more[:, -8:], turns[:, -8:])
        in_chunks = session.cache()
        llama.generate(first, past_key_values=in_chunks, prefill_chunk_size=33, max_new_tokens=1, **GREEDY)
        assert torch.equal(
            llama.generate(history, past_key_values=in_chunks, prefill_chunk_size=17, max_new_tokens=8, **GREEDY), turns
        )


def test_an_evictor_keeps_its_choice_over_turns(llama: PreTrainedModel) -> None:
    first, second = tokens(120, 8), tokens(10, 9)
    with pqcache.use(llama, "snapkv", **SETTINGS["snapkv"]) as session:
        chat = session.cache()
        history = torch.cat([llama.generate(first, past_key_values=chat, max_new_tokens=5, **GREEDY), second], 1)
        llama.generate(history, past_key_values=chat, max_new_tokens=5, **GREEDY)
        report = session.report()
    assert (report.prompt_tokens, report.new_tokens) == (135, 5)
    assert chat.get_seq_length() == 139
    assert report.attended_tokens is not None and report.attended_tokens < 80  # the budget is 64 of the first prompt


@pytest.mark.rest
def test_pipeline() -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir())
    pipe = transformers.pipeline("text-generation", model=model, tokenizer=load_tokenizer())
    text = "The code of the red door is 4711. " * 30
    options = {"max_new_tokens": 4, "do_sample": False, "return_full_text": False}
    stock = pipe(text, **options)
    with pqcache.use(model, "full", budget=1.0):
        assert pipe(text, **options) == stock
    with pqcache.use(model, "streaming", budget=64) as session:
        pipe(text, **options)
    assert session.report().attended_tokens < session.report().prompt_tokens


# -- the block -----------------------------------------------------------------------------------------------------------


def test_an_exception_leaves_the_model_as_it_was(llama: PreTrainedModel) -> None:
    before, ids = state(llama), tokens(70, 1)
    stock = llama.generate(ids, max_new_tokens=4, **GREEDY)
    session, fail = pqcache.use(llama, "pqcache", **SETTINGS["pqcache"]), Mock(side_effect=ZeroDivisionError)
    with pytest.raises(ZeroDivisionError), session:
        fail(llama.generate(ids, max_new_tokens=4, **GREEDY))
    assert state(llama) == before
    with session:  # again; a pass that fails half-way
        handle = llama.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            llama.generate(ids, max_new_tokens=4, **GREEDY)
        handle.remove()
        llama.generate(ids, max_new_tokens=4, **GREEDY)
    assert state(llama) == before
    assert torch.equal(llama.generate(ids, max_new_tokens=4, **GREEDY), stock)


def test_a_generate_of_the_user_s_own_comes_back(llama: PreTrainedModel) -> None:
    calls = []
    own = llama.generate
    llama.generate = lambda *args, **kwargs: calls.append(1) or own(*args, **kwargs)  # type: ignore[method-assign]
    mine = llama.generate
    try:
        with pqcache.use(llama, "full"):
            llama.generate(tokens(10, 1), max_new_tokens=2, **GREEDY)
        assert llama.generate is mine and calls == [1]
    finally:
        del llama.generate


def test_nested_use_is_refused(llama: PreTrainedModel) -> None:
    before = state(llama)
    with pqcache.use(llama, "snapkv") as session:
        with pytest.raises(RuntimeError, match=r"in a session already \(method snapkv\)"), pqcache.use(llama, "full"):
            pass
        with pytest.raises(RuntimeError, match="already"), session:
            pass
        llama.generate(tokens(80, 1), max_new_tokens=2, **GREEDY)
    assert state(llama) == before


def test_calls_of_eight_threads_take_turns(llama: PreTrainedModel) -> None:
    """As in a web server: each gets what it gets alone."""
    prompts = [tokens(70 + 3 * i, seed=i) for i in range(8)]
    how = {"max_new_tokens": 12, "do_sample": False}

    def loop(ids: torch.Tensor) -> torch.Tensor:
        cache, step = None, ids  # the first pass makes the method's
        with torch.no_grad():
            for _ in range(12):
                out = llama(step, past_key_values=cache)
                cache, step = out.past_key_values, out.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, step], 1)
        return ids

    with pqcache.use(llama, "pqcache", budget=0.3, n_sink=4, b=4):
        alone = [llama.generate(ids, **how) for ids in prompts]
        with ThreadPoolExecutor(8) as pool:
            calls = [
                pool.submit(loop if at % 2 else partial(llama.generate, **how), prompts[at % 8]) for at in range(24)
            ]
            together = [call.result() for call in calls]
    assert all(torch.equal(a, b) for a, b in zip(alone * 3, together, strict=True))


def test_a_block_ends_after_the_call_of_another_thread(llama: PreTrainedModel) -> None:
    ids, how, begun = tokens(70, 1), {"max_new_tokens": 60, "do_sample": False}, threading.Event()

    def begin(ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
        begun.set()
        return torch.zeros(len(ids), dtype=torch.bool)

    with ThreadPoolExecutor(1) as pool, pqcache.use(llama, "pqcache", budget=0.3, n_sink=4, b=4):
        alone = llama.generate(ids, **how)
        other = pool.submit(llama.generate, ids, stopping_criteria=[begin], **how)
        begun.wait()
    assert torch.equal(other.result(), alone)


def test_of_two_threads_that_enter_at_once_one_is_refused(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    @contextmanager
    def slow(model: PreTrainedModel) -> Iterator[None]:
        time.sleep(0.1)
        with attach(model):
            yield

    def enter(_: int) -> bool:
        try:
            with pqcache.use(llama, "snapkv"):
                both.wait(60)
        except RuntimeError:
            both.wait(60)
            return False
        return True

    monkeypatch.setattr(sessions, "attach", slow)
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(enter, range(2))) == [False, True]


def test_a_report_before_any_call(llama: PreTrainedModel) -> None:
    with pqcache.use(llama) as session, pytest.raises(RuntimeError, match=r"no call of model\.generate"):
        session.report()


# -- errors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"method": "pqcach"}, ValueError, "method='pqcach': unknown; did you mean pqcache?"),
        ({"method": 3}, TypeError, "method=3: expected a name of pqcache.methods() or an object of a Method"),
        ({"bugdet": 0.2}, TypeError, "bugdet: unknown option of method pqcache; did you mean budget?"),
        ({"budget": 32}, ValueError, "budget=32: allowed is a ratio in (0, 1] or a number of tokens >= 64"),
        ({"m": 3}, ValueError, "m=3: must be 1 or 2 or 4 or 8 or 16"),
        ({"m": "4"}, TypeError, "m='4': expected 1 or 2 or 4 or 8 or 16 (default 2)"),
        ({"dense_layers": 7}, ValueError, "dense_layers=7: the model has 3 layers"),
        (
            {"protocol": "papr"},
            ValueError,
            "protocol=papr: allowed is aligned or paper or release; did you mean paper?",
        ),
        ({"kernels": "atuo"}, ValueError, "kernels='atuo': unknown; did you mean auto"),
        ({"attn": "flash"}, ValueError, "attn='flash': unknown; did you mean flash_attention_2?"),
        ({"method": "zipcache", "budget": 0.5}, pqcache.NotApplicable, "budget=0.5"),
    ],
)
def test_bad_options(llama: PreTrainedModel, arguments: dict, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        pqcache.use(llama, **arguments)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_what_is_no_model_or_no_method(llama: PreTrainedModel) -> None:
    with pytest.raises(TypeError, match=r"expected a loaded model, as AutoModelForCausalLM\.from_pretrained\('gpt2'\)"):
        pqcache.use("gpt2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pqcache\.use\(model, 'pqcache', budget=0\.2\) takes a name"):
        SelectiveCache(llama, "pqcache")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="goes with a method's name; a PQCache object has its own"):
        pqcache.use(llama, pqcache.use(llama).method, budget=0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"past_key_values": DynamicCache()}, "past_key_values of type DynamicCache: inside a session leave it out"),
        ({"use_cache": False}, "use_cache=False: a method works in the cache"),
        ({"cache_implementation": "static"}, "cache_implementation=static: not inside a session"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3: not inside a session: assisted decoding"),
    ],
)
def test_arguments_of_generate_that_a_session_cannot_serve(
    llama: PreTrainedModel, arguments: dict, message: str
) -> None:
    for passes in (False, True) if arguments.keys() & {"past_key_values", "use_cache"} else (False,):
        with pqcache.use(llama), pytest.raises(ValueError) as error:
            llama(tokens(70, 1), **arguments) if passes else llama.generate(
                tokens(70, 1), max_new_tokens=2, **arguments
            )
        assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_conversations_that_do_not_go_on(llama: PreTrainedModel) -> None:
    first = tokens(80, 6)
    with pqcache.use(llama, "full") as session:
        chat = session.cache()
        history = llama.generate(first, past_key_values=chat, max_new_tokens=4, **GREEDY)
        other = torch.cat([history, tokens(5, 1)], 1)
        other[0, 30] += 1
        with pytest.raises(ValueError, match="token 30 is not the one that this cache has seen"):
            llama.generate(other, past_key_values=chat, max_new_tokens=4, **GREEDY)
        with pytest.raises(ValueError, match="20 tokens, but this cache has seen 83: pass the whole conversation"):
            llama.generate(tokens(20, 1), past_key_values=chat, max_new_tokens=4, **GREEDY)
        beams = session.cache()
        out = llama.generate(first, past_key_values=beams, num_beams=2, max_new_tokens=4, **GREEDY)
        with pytest.raises(ValueError, match="are the beams of a search"):
            llama.generate(torch.cat([out, first], 1), past_key_values=beams, num_beams=2, max_new_tokens=4, **GREEDY)


# -- what is listed and what is imported ---------------------------------------------------------------------------------


def test_methods_are_listed_with_kind_and_paper() -> None:
    listed = pqcache.methods()
    assert list(listed) == list(METHODS)
    lines = str(listed).splitlines()
    assert len(lines) == len(METHODS)
    for name, line in zip(METHODS, lines, strict=True):
        info = listed[name]
        assert line.split()[0] == name and info.kind in line and info.kind and info.summary in line
        assert set(info.kind.split(" + ")) <= {"keep all", "retrieve", "evict", "quantize", "any"}
    assert listed["pqcache"].paper == "Zhang et al., arXiv 2407.12820"
    assert (listed["snapkv"].kind, listed["quest"].kind, listed["kivi"].kind) == ("evict", "retrieve", "quantize")
    assert not listed["full"].paper


@pytest.mark.parametrize("more", thin(["", "pqcache.methods()\nimport pqcache.embedded"], 2))
def test_the_import_is_cheap_and_needs_torch_and_transformers_alone(more: str) -> None:
    code = f"""
import sys
import pqcache
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
assert {{"use", "methods"}} <= set(dir(pqcache))
try:
    pqcache.usee
except AttributeError as error:
    assert "usee" in str(error)
{more}
heavy = {{"hydra", "omegaconf", "lm_eval", "datasets", "wandb", "pandas", "matplotlib", "plotly", "numba", "rouge"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"


# -- models that are refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.GPT2Config(n_layer=1), "model gpt2: not supported: absolute position embeddings"),
        (transformers.T5Config(num_layers=1), "model t5: an encoder with a decoder"),
    ],
)
def test_refused_models_are_one_line(config: PreTrainedConfig, reason: str) -> None:
    full = pqcache.use(build("qwen2"), "full").method
    for check in (check_config, lambda config: SelectiveCache(config, full)):
        with pytest.raises(ValueError) as error:
            check(config)
        assert str(error.value).startswith(reason) and "\n" not in str(error.value)


def test_heads_that_the_configuration_does_not_say_are_refused() -> None:
    """Persimmon has a KV head per query head, whatever the configuration says; kernels would read beyond the keys."""
    model = small_model(transformers.PersimmonConfig(**SMALL))
    with (
        pqcache.use(model, "full"),
        pytest.raises(ValueError, match="k 4 x 16.*says 4 query heads and 2 KV heads of 16"),
    ):
        model.generate(tokens(20, 1), max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize(("name", "options"), [("infllm", {}), ("infinigen", {}), ("streaming", {"mode": "rolling"})])
def test_methods_that_rotate_keys_need_layers_that_do(name: str, options: dict) -> None:
    model = small_model(transformers.SmolLM3Config(**{**SMALL, "num_hidden_layers": 4}))
    with pytest.raises(pqcache.NotApplicable, match="some layers of smollm3 do not"):
        pqcache.use(model, name, **options)


def test_parts_of_a_model_keep_their_own_attention() -> None:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SMALL, "head_dim": 16, "query_pre_attn_scalar": 16}
    model = transformers.Gemma3ForConditionalGeneration(
        transformers.Gemma3Config(
            text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4
        )
    )
    model.set_attn_implementation({"vision_config": "eager"})

    def settings() -> list[str]:
        config = model.config
        return [c._attn_implementation for c in (config, config.text_config, config.vision_config)]

    before = settings()
    assert before[1:] == ["sdpa", "eager"]
    with attach(model):
        assert settings()[1] not in before
    assert settings() == before


def with_adapter(model: PreTrainedModel) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(copy.deepcopy(model), config)


@pytest.mark.parametrize("wrap", [partial(torch.compile, backend="eager"), with_adapter], ids=["compiled", "adapter"])
def test_a_wrapped_model_takes_part(llama: PreTrainedModel, wrap: Callable[[PreTrainedModel], Any]) -> None:
    """An adapter changes the answers, and a compiled model does not; either way Full's are those without a session."""
    wrapped, how = wrap(llama), {"input_ids": tokens(120, 1), "max_new_tokens": 6, **GREEDY}
    plain = wrapped.generate(**how)
    assert torch.equal(plain, llama.generate(**how)) == (wrap is not with_adapter)
    with pqcache.use(wrapped, "full"):
        assert torch.equal(wrapped.generate(**how), plain)
    with pqcache.use(wrapped, "snapkv", n_sink=4, w=8, budget=64) as session:
        wrapped.generate(**how)
        assert session.report().attended_tokens < 100
    assert torch.equal(wrapped.generate(**how), plain)
