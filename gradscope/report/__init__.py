"""Output for people: tables, progress, errors, pictures, a page.

Parameter names, targets, paths and messages come from users and files. They are shown as plain
text, never as markup. Unprintable characters are made visible.

The package imports nothing itself: an error is shown without torch, from `report.console`.
"""
