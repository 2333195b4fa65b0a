"""The guard inside vLLM: a plugin for Model Runner V1 and V2, and a doctor. Importing this loads no vLLM."""
