"""Places elsewhere: object stores, web servers, the Hugging Face Hub."""
