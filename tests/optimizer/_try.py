import time
from tests.distributed import run_ranks
def job():
    from tests.optimizer import toy
    from megatron_attnres.optimizer.configuration import OptimizerConfig
    g = toy.make_groups()
    out=[]
    for p in ["fp32","bf16"]:
        for c in (0.0,0.3):
            a = toy.train(OptimizerConfig(lr=1e-2, precision=p, zero_stage=0, clip_grad=c), 20, g)
            b = toy.train(OptimizerConfig(lr=1e-2, precision=p, zero_stage=1, clip_grad=c), 20, g)
            d = max(abs(x-y) for x,y in zip(a["losses"],b["losses"]))
            n = max(abs(x.grad_norm-y.grad_norm) for x,y in zip(a["reports"],b["reports"]))
            out.append((p,c,d,n,a["losses"][0],a["losses"][-1],b["reports"][-1],b["optimizer"].optimizer_state_fraction()))
    return out
if __name__=="__main__":
    t=time.time()
    for n in (2,3,1):
        for r in run_ranks(job,n, timeout=100)[0]: print(n,r)
        print(time.time()-t)
