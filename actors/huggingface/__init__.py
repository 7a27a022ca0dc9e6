"""The parts of `TransformersWorker`: models of transformers over the KV of a cache."""
