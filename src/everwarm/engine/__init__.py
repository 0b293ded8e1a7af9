"""The token loop: the only room that sees both libllama and the prefix tree. Knows no HTTP."""
