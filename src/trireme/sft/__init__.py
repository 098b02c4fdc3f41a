"""The data of supervised training: `reading` (from files to examples) and `data` (from examples to batches). The
training loop is `trireme.train.sft_loop`."""
