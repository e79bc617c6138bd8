"""A tokenizer as the embedded model has it: byte-level BPE of 4096 entries, digits single, every UTF-8 string round-trips.

    <bos> user text <answer> answer text <eos>

is one turn; the chat template renders exactly that.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from pqcache.atomic import write_text

PAD, BOS, EOS, ANSWER = "<pad>", "<bos>", "<eos>", "<answer>"
VOCAB_SIZE = 4096
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<answer>{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'system' %}{{ m['content'] }}\n"
    "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], max_length: int) -> PreTrainedTokenizerFast:
    """BPE over `texts`; the result depends on nothing else."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[PAD, BOS, EOS, ANSWER],
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tok.token_to_id(BOS))]
    )
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS, "additional_special_tokens": [ANSWER]}
    more = {"model_max_length": max_length, "clean_up_tokenization_spaces": False, "padding_side": "left"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tok, **special, **more)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (the chat template goes into the latter)."""
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    path = folder / "tokenizer_config.json"
    facts = json.loads(path.read_text(encoding="utf-8"))
    # Where this process read it from is no property of the tokenizer.
    for key in ("is_local", "local_files_only"):
        facts.pop(key, None)
    write_text(path, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
