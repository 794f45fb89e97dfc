"""Amazon Bedrock."""
