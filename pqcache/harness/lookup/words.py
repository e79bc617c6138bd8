"""What the words of a command mean that are no field of a dataclass."""

from __future__ import annotations

from pqcache import places

GROUP_MEANINGS = {
    "model": "which weights, and how they run; its options are model.<key>",
    "method": "which KV-cache method; its hyper-parameters are method.<key>",
    "task": "what is asked and how it is scored; its options are task.<key>",
    "experiment": "a whole table or figure kept as a file: methods, budgets, tasks and seeds; what is typed beside it wins",
    "launch": "where the cells run; its options are launch.<key>",
}

OTHER_KEYS = {
    "decode": "how the next token is chosen, decode.temperature=0.6 decode.samples=8; its options are decode.<key>",
    "cell": "one cell of an experiment that lists them by name",
    "report": "of a folder of rows: write one HTML file; runs nothing",
    "tables": "of a folder of rows: write its tables; rows=, columns= and values= choose what is in them; runs nothing",
    "list": "methods, tasks, models or experiments: a name and one line each",
    "explain": "an option, a name, a field of row.json or a word of the tables: what it means",
}

FLAGS = {
    "-m, --multirun": "sweep: several values with commas are run one after the other; ends with one table",
    "--cfg job": "print the whole configuration and run nothing",
    "--help": "this text",
    "-sc install=bash": f'complete words with TAB in bash: eval "$({places.COMMAND} -sc install=bash)"; also zsh and fish',
}

EXAMPLES = {
    "method=pqcache budget=0.2": "one cell: prints its row and the path of row.json",
    "-m method=full,oracle,pqcache,streaming budget=0.1,0.2": "a sweep: ends with one table",
    "experiment=demo": "a table kept as a file",
    "experiment=demo plan=true": "what it would do, need and take; runs nothing",
    "method=pqcache --cfg job": "every option of a cell, with its value",
}
