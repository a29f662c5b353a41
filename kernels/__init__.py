"""Operations on the paged KV cache, each with one signature (`ops`) and one backend per device (`dispatch`)."""
