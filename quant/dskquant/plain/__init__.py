"""Graphs that are not language models: named tensors in, named tensors out. The adapters of the engines are theirs."""
