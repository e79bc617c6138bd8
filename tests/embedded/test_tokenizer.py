"""The tokenizer keeps every string as it is, and its chat form is the one of the training rows."""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from pqcache.embedded import load_tokenizer

TOKENIZER = load_tokenizer()  # hypothesis runs one example after another on it


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=80))
@example(text="  two leading spaces,\ttab \n\n\n three newlines  ")
@example(text=" .  , \r\n don 't 12345 \u00a0\u200b 日本語 🙂 \x00")
@example(text="\uf900 \u212b e\u0301")  # what a normalizer would replace
def test_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


def test_digits_are_single_tokens(tok: PreTrainedTokenizerBase) -> None:
    assert tok.tokenize("20481") == ["2", "0", "4", "8", "1"]


def test_chat_form(tok: PreTrainedTokenizerBase) -> None:
    user = {"role": "user", "content": "What is the code of Balot?"}
    reply = {"role": "assistant", "content": "The code of Balot is x."}

    def render(*messages: dict[str, str], prompt: bool) -> str:
        return tok.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)

    assert render(user, prompt=True) == f"<bos>{user['content']}<answer>"
    two_turns = f"<bos>{user['content']}<answer>{reply['content']}<eos>{user['content']}<answer>"
    assert render(user, reply, user, prompt=True) == two_turns
    ids = tok.encode(render(user, prompt=True), add_special_tokens=False)
    assert ids[0] == tok.bos_token_id and ids.count(tok.bos_token_id) == 1
    assert ids[-1] == tok.convert_tokens_to_ids("<answer>")
    assert ids == [*tok.encode(user["content"]), tok.convert_tokens_to_ids("<answer>")]
