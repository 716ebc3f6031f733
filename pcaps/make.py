#!/usr/bin/env python3
"""Makes those captures of this folder that are not recordings of the Linux kernel, each with its truth.

    pcaps/make.py gso      roce_gso_loopback.pcap: needs Linux, tcpdump and CAP_NET_RAW
    pcaps/make.py qinq     roce_ip6_mix_qinq.pcapng.gz, from roce_ip6_mix.pcap: needs editcap
    pcaps/make.py both     rping_both.pcapng, from roce_rping.pcap and iwarp_rping.pcap: needs mergecap

Nothing of userdma is used here: packets are built and decoded from the layouts of the specification alone.
"""
import collections, contextlib, gzip, json, os, socket, struct, subprocess, sys, tempfile, time, zlib

HERE = os.path.dirname(os.path.abspath(__file__))
PORT = 4791
# opcode: name, octets of headers behind the BTH
OPS = {0x04: ("RC_SEND_ONLY", 0), 0x06: ("RC_WRITE_FIRST", 16), 0x07: ("RC_WRITE_MIDDLE", 0), 0x08: ("RC_WRITE_LAST", 0), 0x0C: ("RC_READ_REQUEST", 16),
       0x0D: ("RC_READ_RESP_FIRST", 4), 0x0E: ("RC_READ_RESP_MIDDLE", 0), 0x0F: ("RC_READ_RESP_LAST", 4), 0x11: ("RC_ACK", 4)}


def icrc(ip, udp, rest):
    """Of a packet: its IP header, its 8 octets of UDP, and from the BTH to the pad."""
    ip, udp, rest = bytearray(ip), bytearray(udp), bytearray(rest)
    if ip[0] >> 4 == 4:
        ip[1] = ip[8] = ip[10] = ip[11] = 0xFF
    else:
        ip[0] |= 0x0F
        ip[1] = ip[2] = ip[3] = ip[7] = 0xFF
    udp[6] = udp[7] = rest[4] = 0xFF
    return struct.pack("<I", zlib.crc32(b"\xff" * 8 + ip + udp + rest))


def headers(src, dst, sport, length, ident):
    """IP and UDP of one packet, `length` octets from the BTH to the ICRC, as they stand on a wire behind the segmentation."""
    udp = struct.pack(">HHHH", sport, PORT, length + 8, 0)
    if ":" in src:
        return struct.pack(">IHBB", 6 << 28, length + 8, 17, 64) + socket.inet_pton(socket.AF_INET6, src) + socket.inet_pton(socket.AF_INET6, dst), udp
    return struct.pack(">BBHHHBBH", 0x45, 0, length + 28, ident, 0x4000, 64, 17, 0) + socket.inet_aton(src) + socket.inet_aton(dst), udp


def packet(src, dst, sport, ident, op, qp, psn, ext=b"", payload=b"", ack=False):
    pad = -len(payload) % 4
    bth = struct.pack(">BBHII", op, 0x40 | pad << 4, 0xFFFF, qp, ack << 31 | psn & 0xFFFFFF)
    rest = bth + ext + payload + bytes(pad)
    return rest + icrc(*headers(src, dst, sport, len(rest) + 4, ident), rest)


def pattern(n, seed):
    return bytes((i * 7 + seed) & 0xFF for i in range(n))


def send_trains():
    """Sends what the capture shows: each line one sendmsg, which is one datagram on `lo`."""
    family = {False: socket.AF_INET, True: socket.AF_INET6}
    with contextlib.ExitStack() as stack:
        for address in ("127.0.0.1", "127.0.0.2", "::1"):  # somebody listens, so that no ICMP comes back
            listener = stack.enter_context(socket.socket(family[":" in address], socket.SOCK_DGRAM))
            listener.bind((address, PORT))

        def train(src, dst, sport, packets):
            six = ":" in src
            made = [packet(src, dst, sport, 0 if six else i, *p) for i, p in enumerate(packets)]
            assert all(len(p) == len(made[0]) for p in made[:-1]) and len(made[-1]) <= len(made[0])
            with socket.socket(family[six], socket.SOCK_DGRAM) as s:
                s.bind((src, sport))
                s.setsockopt(*((socket.IPPROTO_IPV6, 23, 2) if six else (socket.IPPROTO_IP, 10, 2)))  # IP(V6)_MTU_DISCOVER = DO: DF, Identification 0, 1, 2 ...
                s.setsockopt(socket.IPPROTO_UDP, 103, len(made[0]))  # UDP_SEGMENT
                assert s.sendto(b"".join(made), (dst, PORT)) == sum(map(len, made))
            time.sleep(0.02)

        a, b = "127.0.0.1", "127.0.0.2"
        reth = struct.pack(">QII", 0x7F0000001000, 0x1234, 1024 * 9 + 333)
        # one WRITE of 9 full packets and 333 octets; its PSNs wrap
        train(a, b, 0xC123, [(0x06, 0x22, 0xFFFFFC, reth, pattern(1024, 0))])
        train(a, b, 0xC123, [(0x07, 0x22, 0xFFFFFD + i, b"", pattern(1024, 1 + i)) for i in range(8)] + [(0x08, 0x22, 5, b"", pattern(333, 9), True)])
        train(b, a, 0xC123, [(0x11, 0x11, 5, struct.pack(">I", 0x1F << 24 | 1))])
        # five SENDs in a train, and the ACKs for each in another
        train(a, b, 0xC123, [(0x04, 0x22, 6 + i, b"", pattern(64, i), True) for i in range(5)])
        train(b, a, 0xC123, [(0x11, 0x11, 6 + i, struct.pack(">I", 0x1F << 24 | 2 + i)) for i in range(5)])
        # over IPv6: a READ of four packets; its FIRST is longer than a MIDDLE, so it goes alone
        c = "::1"
        train(c, c, 0xC456, [(0x0C, 0x33, 100, struct.pack(">QII", 0x2000, 0x99, 1024 * 3 + 500), b"", True)])
        train(c, c, 0xC457, [(0x0D, 0x44, 100, struct.pack(">I", 0x1F << 24 | 1), pattern(1024, 20))])
        train(c, c, 0xC457, [(0x0E, 0x44, 101 + i, b"", pattern(1024, 21 + i)) for i in range(2)] + [(0x0F, 0x44, 103, struct.pack(">I", 0x1F << 24 | 1), pattern(500, 23))])


def pcap_records(path):
    data = open(path, "rb").read()
    assert data[:4] == b"\xd4\xc3\xb2\xa1", "a little-endian pcap with microseconds"
    at = 24
    while at < len(data):
        sec, usec, cap, length = struct.unpack("<IIII", data[at:at + 16])
        yield sec, usec, length, data[at + 16:at + 16 + cap]
        at += 16 + cap


def split(datagram):
    """The packets of a datagram. A train's packets have all one size, the last may be shorter: the size is the one for which every ICRC is right."""
    ip, payload = datagram
    udp, body = payload[:8], payload[8:]

    def pieces(size):
        for i, at in enumerate(range(0, len(body), size)):
            piece = body[at:at + size]
            head, u = bytearray(ip), bytearray(udp)
            u[4:6] = struct.pack(">H", len(piece) + 8)
            if ip[0] >> 4 == 4:
                head[2:4], head[4:6] = struct.pack(">H", len(piece) + 28), struct.pack(">H", struct.unpack(">H", ip[4:6])[0] + i)
            else:
                head[4:6] = struct.pack(">H", len(piece) + 8)
            yield piece, icrc(head, u, piece[:-4]) == piece[-4:]

    for size in range(len(body), 15, -4):
        if 0 < len(body) % size < 16:
            continue
        found = list(pieces(size))
        if all(good for _, good in found):
            return [p for p, _ in found]
    raise SystemExit("a datagram that is no train of good packets")


def decode(p):
    op, flags, pkey, qp, last = struct.unpack(">BBHII", p[:12])
    name, ext = OPS[op]
    pad = flags >> 4 & 3
    out = dict(opcode=name, opcode_value=op, dest_qp=qp, psn=last & 0xFFFFFF, ack_req=bool(last >> 31), solicited=bool(flags >> 7), migreq=bool(flags >> 6 & 1),
               pad=pad, pkey=pkey, payload_len=len(p) - 16 - ext - pad, icrc="good")
    if ext == 16:
        va, key, n = struct.unpack(">QII", p[12:28])
        out["reth"] = dict(va="0x%x" % va, rkey=key, len=n)
    if ext == 4:
        syndrome, = struct.unpack(">I", p[12:16])
        out["aeth"] = dict(kind={0: "ACK", 1: "RNR_NAK", 3: "NAK"}[syndrome >> 29], code=syndrome >> 24 & 31, msn=syndrome & 0xFFFFFF)
    return out


def fields(number, length, src, dst, sport, first):
    """The first packet, in the words of tshark."""
    ib = {"bth.opcode": first["opcode_value"], "bth.se": int(first["solicited"]), "bth.m": int(first["migreq"]), "bth.padcnt": first["pad"], "bth.tver": 0, "bth.p_key": first["pkey"],
          "bth.destqp": first["dest_qp"], "bth.a": int(first["ack_req"]), "bth.psn": first["psn"]}
    if "reth" in first:
        ib |= {"reth.va": first["reth"]["va"], "reth.r_key": first["reth"]["rkey"], "reth.dmalen": first["reth"]["len"]}
    if "aeth" in first:
        ib |= {"aeth.syndrome": {"ACK": 0, "RNR_NAK": 1, "NAK": 3}[first["aeth"]["kind"]] << 5 | first["aeth"]["code"], "aeth.msn": first["aeth"]["msn"]}
    ends = ("ipv6.src", "ipv6.dst") if ":" in src else ("ip.src", "ip.dst")
    return {"frame.number": str(number), "frame.len": str(length), "frame.cap_len": str(length)} | {"infiniband." + k: str(v) for k, v in ib.items()} | dict(zip(ends, (src, dst))) | {"udp.srcport": str(sport), "udp.dstport": str(PORT)}


def anonymous(pcapng):
    """Takes the machine's and the tool's names out of a little-endian section header."""
    kind, length, magic = struct.unpack("<III", pcapng[:12])
    assert (kind, magic) == (0x0A0D0D0A, 0x1A2B3C4D)
    return struct.pack("<I", kind) + struct.pack("<I", 28) + pcapng[8:24] + struct.pack("<I", 28) + pcapng[length:]


def write(name, truth):
    with open(os.path.join(HERE, name), "w") as f:
        json.dump(truth, f, separators=(",", ":"))
        f.write("\n")


def gso():
    path = os.path.join(HERE, "roce_gso_loopback.pcap")
    dump = subprocess.Popen(["tcpdump", "-i", "lo", "-s", "0", "--immediate-mode", "-U", "-w", path, "udp", "port", str(PORT)], stderr=subprocess.PIPE, text=True)
    while "listening on" not in dump.stderr.readline():
        assert dump.poll() is None, "tcpdump did not start"
    time.sleep(1)
    send_trains()
    time.sleep(1)
    dump.terminate()
    dump.wait()
    rows, listed, packets, first = [], [], [], collections.Counter()
    for number, (sec, usec, length, frame) in enumerate(pcap_records(path), 1):
        six = frame[12:14] == b"\x86\xdd"
        cut = 54 if six else 34
        ip = frame[14:cut]
        ends = [socket.inet_ntop(socket.AF_INET6, ip[i:i + 16]) for i in (8, 24)] if six else [socket.inet_ntoa(ip[i:i + 4]) for i in (12, 16)]
        decoded = [decode(p) for p in split((ip, frame[cut:]))]
        rows.append(fields(number, length, *ends, struct.unpack(">H", frame[cut:cut + 2])[0], decoded[0]))
        listed.append([str(number), "%d.%06d000" % (sec, usec), "eth:ethertype:ipv6:udp:infiniband" if six else "eth:ethertype:ip:udp:infiniband", str(length), str(len(frame))])
        packets.append(decoded)
        first[decoded[0]["opcode"]] += 1
    write("roce_gso_loopback.json", {"file": "roce_gso_loopback.pcap", "frames": {"udp4791": len(rows)}, "decoder": "pcaps/make.py",
          "roce": {"frames": len(rows), "opcodes": first, "icrc": {"good": len(rows), "bad": 0}, "cm_mads": {}}, "rows": rows, "frame_list": listed, "packets": packets})
    print([len(p) for p in packets])


def qinq():
    """Two VLAN tags in every frame, in pcapng, gzip'd. Its truth is that of the recording, with the tags added."""
    tags = bytes.fromhex("88a80064 8100e00a")
    with tempfile.TemporaryDirectory() as tmp:
        tagged, pcapng = os.path.join(tmp, "tagged.pcap"), os.path.join(tmp, "out.pcapng")
        data = open(os.path.join(HERE, "roce_ip6_mix.pcap"), "rb").read()
        with open(tagged, "wb") as f:
            f.write(data[:24])
            for sec, usec, length, frame in pcap_records(os.path.join(HERE, "roce_ip6_mix.pcap")):
                frame = frame[:12] + tags + frame[12:]
                f.write(struct.pack("<IIII", sec, usec, len(frame), length + 8) + frame)
        subprocess.run(["editcap", "-F", "pcapng", tagged, pcapng], check=True)
        with open(os.path.join(HERE, "roce_ip6_mix_qinq.pcapng.gz"), "wb") as f, gzip.GzipFile(filename="", mode="wb", fileobj=f, mtime=0) as z:
            z.write(anonymous(open(pcapng, "rb").read()))
    truth = json.load(open(os.path.join(HERE, "roce_ip6_mix.json")))
    keep = {k: truth[k] for k in ("frames", "roce")}
    tagged_stack = lambda p: p.replace("eth:ethertype:", "eth:ethertype:ieee8021ad:ethertype:vlan:ethertype:", 1)
    rows = [r | {"frame.protocols": tagged_stack(r["frame.protocols"]), "frame.len": str(int(r["frame.len"]) + 8), "frame.cap_len": str(int(r["frame.cap_len"]) + 8)} for r in truth["rows"]]
    listed = [[n, t, tagged_stack(p), str(int(a) + 8), str(int(b) + 8)] for n, t, p, a, b in truth["frame_list"]]
    write("roce_ip6_mix_qinq.pcapng.json", {"file": "roce_ip6_mix_qinq.pcapng.gz", "from": "roce_ip6_mix.json"} | keep | {"rows": rows, "frame_list": listed})


def both():
    """A capture with two interfaces: RoCEv2 on one, iWARP on the other. Its truth is that of the two recordings, one after the other."""
    names = ["roce_rping", "iwarp_rping"]
    out = os.path.join(HERE, "rping_both.pcapng")
    subprocess.run(["mergecap", "-F", "pcapng", "-I", "none", "-w", out] + [os.path.join(HERE, n + ".pcap") for n in names], check=True)
    data = open(out, "rb").read()
    open(out, "wb").write(anonymous(data))
    one, two = (json.load(open(os.path.join(HERE, n + ".json"))) for n in names)
    assert float(one["frame_list"][-1][1]) < float(two["frame_list"][0][1]), "the first recording ended before the second began"
    n = len(one["frame_list"])
    assert n == sum(one["frames"].values())
    rows = one["rows"] + [r | {"frame.number": str(int(r["frame.number"]) + n)} for r in two["rows"]]
    listed = one["frame_list"] + [[str(int(f[0]) + n)] + f[1:] for f in two["frame_list"]]
    write("rping_both.json", {"file": "rping_both.pcapng", "from": [x + ".json" for x in names], "frames": len(listed), "roce": one["roce"], "iwarp": two["iwarp"], "rows": rows, "frame_list": listed})


if __name__ == "__main__":
    make = {"gso": gso, "qinq": qinq, "both": both}
    if len(sys.argv) < 2 or set(sys.argv[1:]) - set(make):
        raise SystemExit(__doc__)
    for what in sys.argv[1:]:
        make[what]()
