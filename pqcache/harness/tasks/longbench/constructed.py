"""Rows in LongBench's format, made here to try out `task=longbench*` without its data (`task.source=constructed`).

    construct("hotpotqa", 3, tokens=1024, seed=0, count=lambda text: len(tokenizer(text)["input_ids"]))

The rows have their data set's layout (passages, paragraphs, few-shot examples, code), and their text holds the answer.
They do not show how well a model reads the real rows. Row i depends on (data set, seed, tokens, i) alone.
"""

from collections.abc import Callable
from functools import lru_cache
from random import Random
from typing import Any

from pqcache.embedded.documents import filler_sentence

TRIES = 50  # rows that are made until one is short enough
SHORTEST = 128  # tokens; the fixed parts of every layout need that much
NOMINAL_WORDS = (2000, 6000, 12000)  # LongBench-E: the lengths that rows state in turn, one per bucket

# text -> tokens
Count = Callable[[str], int]

_NAMES = (
    "Alder Birch Cedar Dorrit Elwin Fallon Garrick Hollis Imogen Jasper Keston Larkin Mabel Nolan Orla Perrin".split()
)
_THINGS = "harbour bridge archive mill orchard theatre quarry station garden chapel market library".split()
_VALUES = "amber cobalt crimson emerald ivory jade maroon ochre pearl russet scarlet silver teal umber violet".split()
_TOWNS = "Ashford Brightwater Colwick Dunmere Eastmoor Fernley Greystone Highfield Inverlea Kingsport".split()
_TOWNS_ZH = "白河 青石 东林 南桥 高塘 云岭 金沙 柳湾".split()
_THINGS_ZH = "书院 钟楼 车站 石桥 市场 花园 学校 剧院".split()
_VALUES_ZH = "红色 蓝色 绿色 黄色 白色 黑色 灰色 紫色".split()
_CLASSES = {
    "Food": "What do the people of {t} eat in winter ?",
    "Date": "When was the {o} of {t} opened ?",
    "Animal": "What kind of bird lives near the {o} ?",
    "Price": "How much did the {o} of {t} cost ?",
    "Individual": "Who built the {o} of {t} ?",
    "Distance, linear measure": "How far is it from {t} to the {o} ?",
    "Currency type": "What money was used in {t} ?",
    "Reason": "Why was the {o} of {t} closed ?",
}  # fmt: skip


class _Writer:
    """One row's random choices, and its room in tokens."""

    def __init__(self, rng: Random, room: int, count: Count) -> None:
        self.rng, self.room, self.count = rng, room, count

    def pick(self, words: list[str], n: int) -> list[str]:
        return self.rng.sample(words, n)

    def one(self, words: list[str]) -> str:
        return self.pick(words, 1)[0]

    def sentences(self, n: int) -> str:
        return " ".join(filler_sentence(self.rng) for _ in range(n))

    def fill(self, make: Callable[[int], str], fixed: str, least: int = 0) -> list[str]:
        """make(0), make(1), ...: as many pieces as fit beside the text `fixed`, at least `least`. Each joint takes a token."""
        room = self.room - self.count(fixed)
        pieces: list[str] = []
        while True:
            piece = make(len(pieces))
            room -= self.count(piece) + 1
            if room < 0 and len(pieces) >= least:
                return pieces
            pieces.append(piece)

    def put(self, piece: str, among: list[str]) -> list[str]:
        """The pieces with one more at a random place."""
        at = self.rng.randint(0, len(among))
        return [*among[:at], piece, *among[at:]]


Row = dict[str, Any]


def _row(context: str, input: str, *answers: str) -> Row:
    return {"context": context, "input": input, "answers": list(answers)}


def _fact(writer: _Writer) -> tuple[str, str, str]:
    """(sentence, question, answer)"""
    thing, town, colours = writer.one(_THINGS), writer.one(_TOWNS), writer.pick(_VALUES, 2)
    answer = " and ".join(colours)
    return f"The {thing} of {town} is painted {answer}.", f"In which colours is the {thing} of {town} painted?", answer


def _bodies(pieces: list[str]) -> list[str]:
    """What stands below the first line of each piece."""
    return [piece.partition("\n")[2] for piece in pieces]


def _numbered(title: str, bodies: list[str]) -> str:
    return "\n".join(f"{title} {i}:\n{body}" for i, body in enumerate(bodies, 1))


def _document(writer: _Writer) -> Row:
    """A fact in a long text."""
    fact, question, answer = _fact(writer)
    filler = writer.fill(lambda i: writer.sentences(1), fact + question)
    return _row(" ".join(writer.put(fact, filler)), question, answer)


def _passages(writer: _Writer) -> Row:
    """Numbered passages; two of them lead to the answer."""
    fact, _, answer = _fact(writer)
    name = writer.one(_NAMES)
    town, thing = fact.split(" is ")[0].split(" of ")[1], fact.split(" ")[1]
    link = f"{name} was born in {town}."
    question = f"In which colours is the {thing} of {name}'s home town painted?"
    fixed = f"Passage 1:\n{fact}\nPassage 2:\n{link}{question}"
    filler = writer.fill(lambda i: f"Passage {i}:\n{writer.sentences(2)}", fixed)
    bodies = writer.put(link, writer.put(fact, _bodies(filler)))
    return _row(_numbered("Passage", bodies), question, answer)


def _report(writer: _Writer, title: str = "Section") -> Row:
    """A text in parts, to be summarized; no input."""
    fact, _, _ = _fact(writer)
    parts = _bodies(writer.fill(lambda i: f"{title} {i + 1}:\n{writer.sentences(2)}", f"{title} 1:\n{fact}"))
    summary = " ".join([fact, *(part.partition(".")[0] + "." for part in parts[:2])])
    return _row(_numbered(title, writer.put(fact, parts)), "", summary)


def _meeting(writer: _Writer) -> Row:
    speakers = writer.pick(_NAMES, 3)
    fact, _, _ = _fact(writer)
    question = f"What did {speakers[0]} say about the colours?"
    own = f"{speakers[0]}: {fact}"
    filler = writer.fill(lambda i: f"{speakers[i % 3]}: {writer.sentences(1)}", own + question)
    return _row("\n".join(writer.put(own, filler)), question, f"{speakers[0]} said: {fact}")


def _labels(writer: _Writer) -> Row:
    def example() -> tuple[str, str]:
        label = writer.rng.choice(list(_CLASSES))
        return _CLASSES[label].format(t=writer.one(_TOWNS), o=writer.one(_THINGS)), label

    question, label = example()
    last = f"Question: {question}\nType:"
    shots = writer.fill(lambda i: "Question: {}\nType: {}".format(*example()), last)
    return {**_row("\n".join(shots), last, label), "all_classes": list(_CLASSES)}


def _trivia(writer: _Writer) -> Row:
    def example(_: int) -> str:
        fact, question, answer = _fact(writer)
        return f"Passage:\n{fact} {writer.sentences(1)}\nQuestion:\n{question}\nAnswer:\n{answer}"

    fact, question, answer = _fact(writer)
    last = f"Passage:\n{fact}\nQuestion:\n{question}\nAnswer:\n"
    return _row("\n\n\n".join(writer.fill(example, last)), last, answer, answer.split()[0])


def _dialogues(writer: _Writer) -> Row:
    def dialogue() -> tuple[str, str]:
        one, two = writer.pick(_NAMES, 2)
        fact, question, answer = _fact(writer)
        return f"Dialogue: {one}: {question}\n{two}: {answer}\nSummary: ", f"{two} tells {one}: {fact}"

    last, summary = dialogue()
    return _row("\n".join(writer.fill(lambda i: "".join(dialogue()), last)), last, summary)


def _paragraphs(writer: _Writer) -> list[str]:
    sentences = max(1, writer.room // 1024)  # there are 30 paragraphs at most
    made = writer.fill(lambda i: f"Paragraph {i + 1}: {writer.sentences(sentences)}", "", least=2)
    return [piece.partition(": ")[2] for piece in made]


def _number(paragraphs: list[str]) -> str:
    return "\n\n".join(f"Paragraph {i}: {text}" for i, text in enumerate(paragraphs, 1))


def _repeats(writer: _Writer) -> Row:
    paragraphs = _paragraphs(writer)
    for i in range(1, len(paragraphs), 3):
        paragraphs[i] = min(paragraphs[i - 1], paragraphs[i], key=writer.count)
        paragraphs[i - 1] = paragraphs[i]
    return _row(_number(paragraphs), "", str(len(set(paragraphs))))


def _retrieval(writer: _Writer) -> Row:
    writer.room -= max(48, writer.room // 16)  # the input repeats a paragraph
    paragraphs = _paragraphs(writer)[:30]
    at = writer.rng.randrange(len(paragraphs))
    told = "It is told that " + paragraphs[at][0].lower() + paragraphs[at][1:]
    return _row(_number(paragraphs), told, f"Paragraph {at + 1}")


def _sentence_zh(writer: _Writer) -> str:
    return f"{writer.one(_TOWNS_ZH)}的{writer.one(_THINGS_ZH)}建于{writer.rng.randrange(1200, 2000)}年。"


def _document_zh(writer: _Writer) -> Row:
    place, colour = f"{writer.one(_TOWNS_ZH)}的{writer.one(_THINGS_ZH)}", writer.one(_VALUES_ZH)
    fact, question = f"{place}是{colour}的。", f"{place}是什么颜色的？"
    filler = writer.fill(lambda i: _sentence_zh(writer), fact + question)
    return _row("".join(writer.put(fact, filler)), question, f"{colour}。")


def _retrieval_zh(writer: _Writer) -> Row:
    writer.room -= max(48, writer.room // 16)  # as in _retrieval
    paragraphs = writer.fill(lambda i: f"段落{i + 1}：{_sentence_zh(writer)}", "", least=2)
    number, _, told = writer.one(paragraphs).partition("：")
    return _row("\n".join(paragraphs), f"据说{told}", number)


def _function(writer: _Writer) -> str:
    thing, colour = writer.pick(_THINGS, 2), writer.one(_VALUES)
    return f"def {thing[0]}_{colour}({thing[1]}):\n    return {thing[1]} + {writer.rng.randrange(100)}\n"


def _code(writer: _Writer) -> Row:
    body = "def paint(wall, colour):\n    wall.colour = colour\n"
    return _row("\n".join([*writer.fill(lambda i: _function(writer), body), body]), "", "    return wall")


def _repository(writer: _Writer) -> Row:
    colour, path = writer.one(_VALUES), "# Path: src/colours.py\n"
    body = f"# Path: src/main.py\nfrom colours import mix_{colour}\n\ndef main(wall):\n"
    needed = f"def mix_{colour}(wall):\n    return wall\n"
    functions = writer.put(needed, writer.fill(lambda i: _function(writer), path + needed + body))
    return _row(path + "\n".join(functions), body, f"    return mix_{colour}(wall)")


_LAYOUTS: dict[str, Callable[[_Writer], Row]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), _document),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), _passages),
    "gov_report": _report,
    "qmsum": _meeting,
    "multi_news": lambda writer: _report(writer, "Passage"),
    "trec": _labels,
    "triviaqa": _trivia,
    "samsum": _dialogues,
    "passage_count": _repeats,
    "passage_retrieval_en": _retrieval,
    "repobench-p": _repository,
    "lcc": _code,
    "multifieldqa_zh": _document_zh,
    "passage_retrieval_zh": _retrieval_zh,
}


def construct(dataset: str, n: int, tokens: int, seed: int, count: Count, *, e: bool = False) -> list[Row]:
    """`n` rows. Context and input of each have together at most `tokens` tokens, counted by `count`.

    e: rows of LongBench-E, which state NOMINAL_WORDS as their lengths.
    """
    counted = lru_cache(maxsize=4096)(count)
    rows = []
    for i in range(n):
        room = tokens
        for _ in range(TRIES):
            row = _LAYOUTS[dataset](_Writer(Random(f"longbench/{dataset}/{seed}/{tokens}/{i}"), room, counted))
            over = count(row["context"]) + count(row["input"]) - tokens
            if over <= 0:
                break
            room -= max(over, 4)  # joined pieces may have more tokens than separate ones
        else:
            small = f"too small for a row of {dataset} with this tokenizer"
            raise ValueError(f"task.constructed_tokens={tokens}: {small}")
        words = len(f"{row['context']} {row['input']}".split())
        facts = {
            "length": NOMINAL_WORDS[i % len(NOMINAL_WORDS)] if e else words,
            "dataset": dataset,
            "language": "python" if dataset in ("repobench-p", "lcc") else "zh" if dataset.endswith("_zh") else "en",
            "all_classes": row.get("all_classes"),
            "_id": f"constructed-{dataset}-{seed}-{i}",
        }
        rows.append({**{key: row[key] for key in ("input", "context", "answers")}, **facts})
    return rows
