"""Fuzzing of ckptconv: files mutated and made up, each given to the library as a user would, and
judged.

`seeds` are good files of every container; `mutations` damage them, `structures` makes up new ones
with hypothesis; `trial` does with a file what a user would and says what was wrong with the answer;
`hunt` runs trials in processes that may hang or die; `torch_oracle` says what torch sees;
`coverage` lets atheris choose the inputs. ``python -m fuzzing`` is the command.
"""
