"""Texts of the OpenAPI document that the handlers and structs do not carry."""
