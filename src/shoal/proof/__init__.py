"""Convergence proofs (`shoal prove`): read the records of two runs, compare them and name the likely cause.

The records are written by `shoal.train.proof_record` and `shoal.train.proof_watch`. May import shoal.plan and the
layers below it; torch only where it is installed.
"""
