"""The main job: a byte-level mixture-of-experts language model that trains through the runtime."""
