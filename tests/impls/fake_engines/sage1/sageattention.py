"""SageAttention 1.0.6: bhsd by default, and the mean of K is subtracted in the caller's own array."""

from plain_attention import attend


def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=1.0, smooth_k=True, **kwargs):
    assert tensor_layout == "NHD"
    assert not is_causal or q.shape[1] == k.shape[1], "qo_len and kv_len must be equal for causal attention"
    k -= k.mean(dim=1, keepdim=True)
    return attend(q, k, v, sm_scale, None, 0 if is_causal else None)[0]
