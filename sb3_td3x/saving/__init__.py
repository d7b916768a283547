"""Models and buffers as files that are read without running the code in them."""
