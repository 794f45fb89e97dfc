"""IBM watsonx.ai."""
