"""Train Llama-family language models from scratch on the memory you really have."""
