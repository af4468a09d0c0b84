import asyncio, time
from tests.kit import *
async def test_a():
    print(type(asyncio.get_running_loop()))
    t=time.time()
    async with gateway([say("Hello there, friend.")]) as g:
        s = await g.open()
        print("open", time.time()-t)
        r = await g.client(s.key).chat.completions.create(model="m", messages=[user("Hi")])
        print(r)
        print((await g.turns(s.id)))
        r = await asyncio.to_thread(lambda: g.sync_client(s.key).models.list())
        print(r)
    print(time.time()-t)
async def test_b():
    t=time.time()
    async with gateway([say("Hello there, friend.")]) as g:
        s = await g.open()
        r = await g.client(s.key).chat.completions.create(model="m", messages=[user("Hi")], stream=True)
        print(heard([c async for c in r]))
    print(time.time()-t)
    1/0
def test_real(real_tokenizer):
    t=time.time()
    print(renderer(real_tokenizer), time.time()-t); 1/0
