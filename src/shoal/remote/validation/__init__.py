"""The tests of `shoal validate`, as the ranks of a job run them: standard library, and torch where the job has it.

They travel as the code of the job, below a package of any name. So they import each other by relative names.
"""
