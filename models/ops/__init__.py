"""Operations with more than one implementation; here, the one place that picks. Today the reference serves everywhere."""

from models.ops.attention_residual import attention_residual_update, score, wide

__all__ = ["attention_residual_update", "score", "wide"]
