"""The library in five lines: a transformers model under a KV-cache method, for as long as a `with` block lasts.

    import pqcache

    with pqcache.use(model, "pqcache", budget=0.2, m=4) as session:
        out = model.generate(**inputs, max_new_tokens=100)      # sampling, beams, left-padded batches, pipelines as ever
        print(session.report())                                 # tokens attended, bytes, seconds of that call

Each call of `generate` gets a cache of its own. A conversation keeps one over its calls:

    with pqcache.use(model, "snapkv", budget=512) as session:
        chat = session.cache()
        history = model.generate(first, past_key_values=chat, max_new_tokens=50)
        history = model.generate(torch.cat([history, question], 1), past_key_values=chat, max_new_tokens=50)

So does a loop of your own: `model(ids, past_key_values=cache, use_cache=True)`. A forward pass without a cache of the session
is an ordinary one. `pqcache.methods()` lists the methods; the options of one are described in configs/method/<name>.yaml.
"""

from pqcache.api.invariants import check
from pqcache.api.listing import MethodInfo, Methods, methods
from pqcache.api.report import Report
from pqcache.api.session import Session, use
from pqcache.selective import NotApplicable

__all__ = ["MethodInfo", "Methods", "NotApplicable", "Report", "Session", "check", "methods", "use"]
