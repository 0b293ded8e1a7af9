"""Every model a server can offer: files and folders, a TOML file, the Hugging Face Hub; what each needs in memory."""
