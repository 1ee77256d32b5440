"""GGUF: one file with the header, the tokenizer and the weights of a model.

`header.py` reads the file with checks of every size, `config.py` turns the header into the fields of config.json,
`names.py` the names of tensors into the names of transformers, `blocks.py` blocks of codes into matrices,
`tokenizer.py` the vocabulary into a tokenizer, and `tensors.py` gives the tensors as safetensors does.
`specjax.models.Checkpoint` puts these together.
"""
