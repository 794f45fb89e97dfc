"""Azure OpenAI, and rerankers of Azure's Foundry."""
