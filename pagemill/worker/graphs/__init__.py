"""CUDA graphs: which graph a batch runs in, capture and replay, and the compiler's pieces between attention layers."""
