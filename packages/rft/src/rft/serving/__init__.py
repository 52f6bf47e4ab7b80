"""Rewards behind HTTP: requests as items, one queue before the reward, and a server that can be started and closed.

FastAPI and uvicorn are imported in `application` and `server` alone (extra `serve`).
"""
