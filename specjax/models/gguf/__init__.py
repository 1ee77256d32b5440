"""GGUF: one file with the header, the tokenizer and the weights of a model.

`header.py` reads the file with checks of every size, `fields.py` gives its fields, and `config.py` turns them into the
fields of config.json. `architectures.py` says how architectures differ, by groups of them in `dense.py`, `gemmas.py`,
`mixtures.py`, `latents.py`, `delta_nets.py` and `mamba.py`. `names.py` turns the names of tensors into the names of
transformers, `places.py` says where their numbers lie, `blocks.py` turns blocks of codes into matrices, `tokenizer.py`
the vocabulary into a tokenizer, and `tensors.py` gives the tensors as safetensors does. `specjax.models.Checkpoint`
puts these together.
"""
