"""How each protocol reads requests and writes answers.

`requests` and `answers` hold what all protocols share, `*_schema` the models of requests.
"""
