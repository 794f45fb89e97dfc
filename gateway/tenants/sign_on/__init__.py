"""Single sign-on: tokens of issuers in place of API keys, by OpenID Connect."""
