"""lm-eval's mathematics tasks beside Hydra: their functions run in a process with packages of its own.

Those tasks read formulas with ANTLR 4.11, Hydra needs ANTLR 4.9, and an environment holds one of them. So a folder that is not
part of the environment holds ANTLR 4.11, sympy and math_verify, and only the process whose path begins with it sees them.

    packages.py   where the folder is, what it holds and how it is made
    child.py      the process: runs the functions of one file of lm-eval
    parent.py     starts it, calls its functions with a time limit, starts it again where it was lost
    stand_in.py   the module that lm-eval gets in place of that file
"""
