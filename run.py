"""Run causal LMs under KV-cache methods and measure quality, latency and bytes.

    python run.py method=pqcache budget=0.2                                 one cell: prints its row and its row.json
    python run.py -m method=full,oracle,pqcache,streaming budget=0.1,0.2     a sweep: ends with one table
    python run.py experiment=demo                                           a table kept in configs/experiment/demos.yaml
    python run.py method=pqcache task.length=4096 method.m=4 --cfg job      print the configuration, run nothing
    python run.py experiment=demo plan=true                                 what it would do, need and take; run nothing
    python run.py report=results/runs                                       one HTML file of rows that are there
    python run.py tables=results/runs rows=method columns=budget            tables of them
    python run.py advise=results/runs memory=0.25 quality=-2                which methods stay within limits
    python run.py list=methods                                              what there is; also tasks, models, experiments
    python run.py explain=method.m                                          what an option or a name means
    python run.py --help                                                    every key with its meaning

Exit codes: 0 done, 1 a cell failed, 2 the command is wrong (nothing was loaded), 130 interrupted.
An installed package has the same command as `pqcache`.
"""

import sys

from pqcache.harness.command import main
from pqcache.places import CONFIGS

__all__ = ["CONFIGS", "main"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
