//! Two peers in one program: one offers memory, the other writes and reads it and says so.
//!
//! `cargo run -p userdma --example two_peers`
use userdma::{Access, Device, QpInit, RKey, RecvWr, Region, RemoteAddr, Result};

#[tokio::main]
async fn main() -> Result<()> {
    let device = Device::open("tcp://127.0.0.1:0")?;
    let listener = device.listen(None).await?;
    let peer = listener.local_addr().to_string();
    tokio::try_join!(serve(&device, listener), connect(&device, &peer))?;
    Ok(())
}

/// Registers 64 KiB, tells the peer where they are, and waits for it to say that it is done.
async fn serve(device: &Device, listener: userdma::Listener) -> Result<()> {
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(64)?);
    let memory = pd.register(Region::alloc(64 << 10)?, Access::all())?;

    let request = listener.accept().await?;
    println!("{} says {:?}", request.peer_addr(), String::from_utf8_lossy(request.private_data()));
    let place = memory.remote(0);
    let offer = [place.addr.to_be_bytes().as_slice(), &place.rkey.0.to_be_bytes()].concat();
    // A receive must be there before the peer can send.
    let qp = pd.create_qp(QpInit::new(&cq))?;
    qp.post_recv(RecvWr::new(1, [memory.slice(1024..2048)]))?;
    request.accept_qp(&qp, &offer).await?;

    let wc = cq.next().await?;
    for (what, offset, len) in [("message", 1024, wc.byte_len as usize), ("memory", 0, 12)] {
        let mut octets = vec![0; len];
        memory.read_at(offset, &mut octets)?;
        println!("{what}: {:?}", String::from_utf8_lossy(&octets));
    }
    qp.disconnect().await;
    Ok(())
}

/// Writes into the peer's memory, reads it back, adds to a word of it.
async fn connect(device: &Device, peer: &str) -> Result<()> {
    let (pd, cq) = (device.alloc_pd()?, device.create_cq(64)?);
    let memory = pd.register(Region::alloc(4096)?, Access::LOCAL_WRITE)?;

    let qp = device.connect(peer, &pd, QpInit::new(&cq), b"two_peers").await?;
    let offer = qp.private_data();
    let (addr, rkey) = offer.split_at(8);
    let number = |octets: &[u8]| octets.iter().fold(0, |n, &o| n << 8 | u64::from(o));
    let place = RemoteAddr::new(number(addr), RKey(number(rkey) as u32));

    memory.write_at(0, b"hello memory")?;
    qp.write(memory.slice(0..12), place).await?;
    qp.read(memory.slice(2048..2060), place).await?;
    let counter = RemoteAddr::new(place.addr + 64, place.rkey);
    println!("counter: {} before", qp.fetch_add(counter, 42).await?);
    qp.send_lent(b"it is written".to_vec()).await.1?;
    qp.closed().await;
    Ok(())
}
