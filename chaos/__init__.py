"""Chaos: ten kinds of fault befall a learner's workers, and every transition it is given is checked.

`python -m chaos` runs it. `places` are where workers run, `faults` what befalls them, `modes` how the learner works
meanwhile, `campaign` one place's faults, one after another, and `page` what came of them all.
"""
